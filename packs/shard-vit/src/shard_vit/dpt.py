"""How DPT is sharded: a ViT in the early layout, or another backbone, and convolutions that read several blocks."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn
from typing_extensions import override

from shard_vit.before59 import OldViTPolicy
from shardcore.policy import Heads, ModulePolicy, Stages
from shardcore.styles import delegate, refuse, replicate


def _normalizes_batches(model: Any) -> bool:
    return any(isinstance(module, nn.BatchNorm2d) for module in model.neck.modules())


class EncoderHeads(Heads):
    """The heads of the encoder; with a backbone in its place, their number in the configuration means nothing."""

    @override
    def problem(self, model: Any, ranks: int) -> tuple[str, str] | None:
        """Return what is wrong with the numbers of heads, and what to do."""
        return super().problem(model, ranks) if model.backbone is None else None


class DPTForDepthEstimationPolicy(OldViTPolicy):
    """The encoder, or a backbone in its place that is left to the pack of its class, with a head that makes depths."""

    checks = (EncoderHeads("num_attention_heads"),)
    labels = ("neck", "head")
    divided: ClassVar[str | tuple[str, ...]] = ()  # the head reads all tokens of several blocks

    @override
    def set_model(self, model: nn.Module) -> None:
        """Take the model, and say what its stages are."""
        super().set_model(model)
        if self.model.backbone is not None:
            self.stages = Stages(blocks="backbone", last=self.labels)

    @override
    def module_policy(self) -> ModulePolicy:
        if self.model.backbone is None:
            return super().module_policy()
        return {self.model: [delegate("backbone"), *self.heads()[self.model]]}

    @override
    def heads(self) -> ModulePolicy:
        """Return the rules of what makes depths of the states."""
        why = "use_batch_norm_in_fusion_residual normalizes over a batch, of which a pipeline computes parts"
        return {self.model: [refuse(_normalizes_batches, why), replicate(*self.labels)]}
