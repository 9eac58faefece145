"""How Table Transformer is sharded: as DETR, under other names, with norms in front and behind the encoder."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from shard_detr.policy import DetrPolicy, heads_of
from shardcore.nn import ReplacedMethods
from shardcore.policy import Rule, Stages, Word
from shardcore.styles import attribute, enter_arg, layer_drop, local_heads, norm, outputs, sequence


def _attend(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    object_queries: Tensor | None = None,
    key_value_states: Tensor | None = None,
    spatial_position_embeddings: Tensor | None = None,
    output_attentions: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return what `TableTransformerAttention` returns for states (B, Q, H), and its weights (B, heads/tp, Q, K).

    Its own forward takes the width of all heads for that of its input; here it follows from the heads that are here.
    Written against transformers 5.5.4 to 5.24, which are alike.
    """
    queries = hidden_states if object_queries is None else hidden_states + object_queries
    if key_value_states is None:
        keys, values = queries, hidden_states
    else:
        keys = values = key_value_states
        if spatial_position_embeddings is not None:
            keys = keys + spatial_position_embeddings
    query, key, value = (
        linear(states).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
        for linear, states in ((self.q_proj, queries), (self.k_proj, keys), (self.v_proj, values))
    )
    scores = (query * self.scaling) @ key.transpose(-1, -2)
    if attention_mask is not None:
        masked = attention_mask.dtype.is_floating_point
        scores = scores + attention_mask if masked else scores.masked_fill(attention_mask, -float("inf"))
    weights = scores.softmax(-1)
    mixed = functional.dropout(weights, p=self.dropout, training=self.training) @ value
    return self.out_proj(mixed.transpose(1, 2).flatten(2)), weights if output_attentions else None


class _Attention(ReplacedMethods):
    forward = _attend


class TableTransformerPolicy(DetrPolicy):
    """The model with its head or without."""

    family: ClassVar[str] = "TableTransformer"
    checks = heads_of("TableTransformer")
    stages = Stages(
        first=("backbone", "input_projection"),
        blocks=("encoder.layers", "decoder.layers"),
        between=("encoder.layernorm", "query_position_embeddings"),
        last="decoder.layernorm",
    )
    positions = ("object_queries", "query_position_embeddings")
    out: ClassVar[str] = "out_proj"
    mlp: ClassVar[tuple[str, str]] = ("fc1", "fc2")

    @override
    def encoder(self) -> list[Rule]:
        return [
            enter_arg("", self.positions[0]),
            norm("layernorm"),
            layer_drop("layerdrop"),
            sequence(scatter="layers[0]", gather="layernorm"),
            outputs(attentions="heads", hidden_states="sequence"),
        ]

    @override
    def decoder(self) -> list[Rule]:
        return [*super().decoder(), layer_drop("layerdrop")]

    @override
    def attention(self, name: str, columns: tuple[str, ...]) -> list[Rule]:
        attends = Word(text=f"attends({name!r})", planned=lambda scope: scope.swap(name, _Attention))
        return [*super().attention(name, columns), attends, attribute(f"{name}.num_heads", local_heads)]
