"""How timm's Swins are sharded: v1, v2, and v2 as Christoph Reich wrote it (``swinv2_cr``)."""

from __future__ import annotations

from typing import Any, ClassVar

from typing_extensions import override

from shard_swin.stages import HeadsOfStages, shared
from shard_swin.timm_attention import Swinv2Attention, Swinv2CrAttention
from shardcore.policy import ModulePolicy, Policy, Rule, Stages, Word
from shardcore.styles import (
    attribute,
    by_heads,
    calls,
    norm,
    partial,
    per_rank,
    region,
    replicate,
    segments,
    shared_rng,
)

#: The methods besides ``forward`` that run a model.
RUNS = ("forward_features", "forward_head", "forward_intermediates")


class SwinTransformerPolicy(Policy):
    """Stages of windows; what attends there has a bias for each head and distance."""

    checks = (HeadsOfStages("layers.*.blocks.0.attn.num_heads"),)
    stages = Stages(first="patch_embed", blocks="layers", last=("norm", "head"))
    block: ClassVar[str] = "SwinTransformerBlock"
    norms: ClassVar[tuple[str, ...]] = ("norm1", "norm2")

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the stages, of what merges patches between them, and of the head."""
        attention = region(enter="attn", col=segments("attn.qkv", 3), row="attn.proj", heads="attn.num_heads")
        return {
            self.model: [replicate("patch_embed", "head"), replicate("norm", optional=True), calls(*RUNS)],
            "PatchMerging": [norm("norm"), replicate("reduction")],
            self.block: [
                norm(*self.norms),
                shared(
                    "attn.num_heads",
                    attention,
                    attribute("attn.num_heads", per_rank),
                    *self.by_head(),
                    whole="attn",
                ),
                region(enter="mlp", col="mlp.fc1", row="mlp.fc2"),
                shared_rng("drop_path1", "drop_path2"),
            ],
        }

    def by_head(self) -> list[Rule]:
        """Return the rules of what an attention has for each head."""
        return [by_heads("attn.relative_position_bias_table", dim=1)]


class SwinTransformerV2Policy(SwinTransformerPolicy):
    """Attention by cosines with a scale for each head, and biases that a network makes of distances."""

    block: ClassVar[str] = "SwinTransformerV2Block"
    attends: ClassVar[Any] = Swinv2Attention

    @override
    def by_head(self) -> list[Rule]:
        biased = self.model.layers[0].blocks[0].attn.q_bias is not None
        own = [by_heads("attn.q_bias", "attn.v_bias")] if biased else []
        return [*own, *self.biases("attn.cpb_mlp.0", "attn.cpb_mlp.2")]

    def biases(self, hidden: str, last: str) -> list[Rule]:
        """Return the rules of the scales and of the network of biases, whose ``last`` linear has one row for a head."""
        attends = Word(text="attends()", planned=lambda scope: scope.swap("attn", self.attends))
        return [by_heads("attn.logit_scale", last), partial(hidden), attends]


class SwinTransformerV2CrPolicy(SwinTransformerV2Policy):
    """The same with other names; its network of biases has a dropout, which is that of all heads."""

    checks = (HeadsOfStages("stages.*.blocks.0.attn.num_heads"),)
    stages = Stages(first="patch_embed", blocks="stages", last="head")
    block: ClassVar[str] = "SwinTransformerV2CrBlock"
    norms: ClassVar[tuple[str, ...]] = ("norm1", "norm2", "norm3")
    attends: ClassVar[Any] = Swinv2CrAttention

    @override
    def by_head(self) -> list[Rule]:
        return [*self.biases("attn.meta_mlp.fc1", "attn.meta_mlp.fc2"), shared_rng("attn.meta_mlp.drop1")]
