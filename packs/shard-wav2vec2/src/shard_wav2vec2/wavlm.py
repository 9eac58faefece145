"""How WavLM is sharded: gates of each head scale a bias for each distance, which the first block makes for all."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from torch.nn.functional import dropout, softmax
from typing_extensions import override

from shard_wav2vec2.policy import Wav2Vec2Policy
from shardcore.nn import ReplacedMethods
from shardcore.policy import Heads, Rule, Word
from shardcore.styles import attribute, by_heads, outputs, partial, per_rank, region


class WavLMPolicy(Wav2Vec2Policy):
    """The model with a head or without; the number of ranks divides its heads."""

    checks = (Heads("num_attention_heads"),)
    divided: ClassVar[str | tuple[str, ...]] = ()  # its attention is written out

    @override
    def captured(self) -> Rule:
        """Attention weights are a mean over all heads, and no rank has it."""
        return outputs(hidden_states="sequence")

    @override
    def attention(self) -> list[Rule]:
        columns = ("attention.q_proj", "attention.k_proj", "attention.v_proj")
        return [
            region(enter="attention", col=columns, row="attention.out_proj", unit="head"),
            attribute("attention.num_heads", per_rank),
            by_heads("attention.gru_rel_pos_const", dim=1),
            by_heads("attention.rel_attn_embed", dim=1, optional=True),
            partial("attention.gru_rel_pos_linear"),
            Word(text="attends()", planned=lambda scope: scope.swap("attention", _Attention)),
        ]


def _attend(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None, Tensor]:
    """Return what `WavLMAttention` returns for states (B, T, H), without weights, and the bias (B * heads/tp, T, T).

    Its own forward gates heads by parts of its input, as many as there are heads, and hands whole weights to a function
    of torch. Here a rank reads the parts of its own heads. Written against transformers 4.57.6 to 5.24.
    """
    rows, length, _ = hidden_states.shape
    first = self._shard_context.rank * self.num_heads
    parts = hidden_states.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, heads, T, D)
    gated = self.gru_rel_pos_linear(parts[:, first : first + self.num_heads]).unflatten(-1, (2, 4)).sum(-1)
    opened, scaled = gated.sigmoid().chunk(2, dim=-1)  # each (B, heads/tp, T, 1)
    gate = opened * (scaled * self.gru_rel_pos_const - 1.0) + 2.0
    if position_bias is None:
        position_bias = self.compute_bias(length, length).repeat(rows, 1, 1)
    bias = gate * position_bias.unflatten(0, (rows, -1))
    if attention_mask is not None:
        bias = bias.masked_fill(attention_mask.ne(1)[:, None, None], float("-inf"))
    query, key, value = (
        projection(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        for projection in (self.q_proj, self.k_proj, self.v_proj)
    )
    weights = softmax(query @ key.transpose(-1, -2) * self.scaling + bias, dim=-1)
    states = dropout(weights, self.dropout, self.training) @ value
    return self.out_proj(states.transpose(1, 2).flatten(2)), None, position_bias


class _Attention(ReplacedMethods):
    forward = _attend
