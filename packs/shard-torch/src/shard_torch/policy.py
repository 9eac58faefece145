"""How the transformers of torch are sharded: whole, a stack of them, a layer or its attention alone."""

from __future__ import annotations

from torch import nn

from shard_torch.words import mixes_features, rest, stack
from shardcore.policy import ModulePolicy, Policy, Rule, Stages
from shardcore.styles import attention, attribute, enter_arg, norm, partial, refuse, region

_MLP: tuple[Rule, ...] = (
    refuse(mixes_features, "its activation computes features from others, of which each rank has a part"),
    region(col="linear1", row="linear2"),
    partial("activation", optional=True),  # one that learns, PReLU
)
_RULES: dict[type[nn.Module], tuple[Rule, ...]] = {
    nn.TransformerEncoderLayer: (
        attention("self_attn", of="self"),
        norm("norm1", "norm2"),
        *_MLP,
        attribute("activation_relu_or_gelu", 0),  # of no other use than to choose one kernel for the whole layer
    ),
    nn.TransformerDecoderLayer: (
        attention("self_attn", of="self"),
        attention("multihead_attn", of="memory"),
        norm("norm1", "norm2", "norm3"),
        *_MLP,
    ),
    nn.TransformerEncoder: (stack(),),
    nn.TransformerDecoder: (enter_arg("", "memory"), stack()),
}


def rules_in(model: nn.Module) -> ModulePolicy:
    """Return the rules for the stacks and layers of torch that a model has, for a policy of your own."""
    return {kind: rules for kind, rules in _RULES.items() if any(isinstance(m, kind) for m in model.modules())}


class TransformerPolicy(Policy):
    """An encoder and a decoder."""

    stages = Stages(blocks=("encoder.layers", "decoder.layers"), between="encoder.norm", last="decoder.norm")

    def module_policy(self) -> ModulePolicy:
        """Return the rules of what is there."""
        return rules_in(self.model)


class TransformerEncoderPolicy(TransformerPolicy):
    """A stack of layers that attend to themselves."""

    stages = Stages(blocks="layers", last="norm")


class TransformerDecoderPolicy(TransformerEncoderPolicy):
    """A stack of layers that attend to an encoder's states too, which enter once for all."""


class TransformerEncoderLayerPolicy(TransformerPolicy):
    """One layer alone."""

    stages = Stages(first=("self_attn", "norm1", "linear1", "linear2", "norm2"))


class TransformerDecoderLayerPolicy(TransformerPolicy):
    """One layer alone."""

    stages = Stages(first=("self_attn", "norm1", "multihead_attn", "norm2", "linear1", "linear2", "norm3"))


class MultiheadAttentionPolicy(Policy):
    """Attention alone: query, key and value enter, each by itself."""

    stages = Stages(
        first=("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias", "bias_k", "bias_v"),
        last="out_proj",
    )

    def module_policy(self) -> ModulePolicy:
        """Return the one rule."""
        return {"MultiheadAttention": [attention("")]}


class OwnModelPolicy(Policy):
    """A model of your own that contains transformers, layers or attention of torch: the rest is whole on every rank."""

    def module_policy(self) -> ModulePolicy:
        """Return the rules of what is there."""
        return {**rules_in(self.model), type(self.model): [rest()]}
