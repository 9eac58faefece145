"""How Parakeet is sharded: a Conformer in front of convolutions that make of spectra fewer, and heads of many kinds."""

from __future__ import annotations

from torch import nn
from typing_extensions import override

from shardcore.policy import ModulePolicy, Stages
from shardcore.styles import attribute, by_heads, calls, layer_drop, norm, outputs, per_rank, region, replicate
from shardcore_transformers import PretrainedPolicy

_HEADS = "self_attn.config.num_attention_heads"


class ParakeetPolicy(PretrainedPolicy):
    """The encoder, alone or with a head, which is whole on every rank; and so are convolutions.

    These mix tokens, so that there is no sequence parallelism. In training they normalize over all rows, of which
    micro-batches have some: the stages name no blocks, so that there are no pipelines.
    """

    @override
    def set_model(self, model: nn.Module) -> None:
        super().set_model(model)
        self.stages = Stages(first=tuple(model._modules))

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the encoder, of its blocks, and of its head."""
        columns = ("q_proj", "k_proj", "v_proj", "relative_k_proj")
        return {
            "ParakeetEncoder": [
                replicate("subsampling"),
                layer_drop("layerdrop"),
                outputs(attentions="heads", heads=f"layers.0.{_HEADS}"),
            ],
            "ParakeetEncoderBlock": [
                norm("norm_feed_forward1", "norm_self_att", "norm_conv", "norm_feed_forward2", "norm_out"),
                *(
                    region(enter=name, col=f"{name}.linear1", row=f"{name}.linear2")
                    for name in ("feed_forward1", "feed_forward2")
                ),
                region(
                    enter="self_attn",
                    col=tuple(f"self_attn.{name}" for name in columns),
                    row="self_attn.o_proj",
                    heads=_HEADS,
                ),
                by_heads("self_attn.bias_u", "self_attn.bias_v", heads=_HEADS),
                attribute(_HEADS, per_rank),
                replicate("conv"),
            ],
            **self.head(),
        }

    def head(self) -> ModulePolicy:
        """Return the rules of what is behind the encoder, if there is anything."""
        if not hasattr(self.model, "encoder"):
            return {}
        own = [name for name in self.model._modules if name != "encoder"]
        if not hasattr(self.model, "decoder"):
            return {self.model: [replicate(*own)]}
        return {self.model: [replicate(*own), calls("get_audio_features")]}
