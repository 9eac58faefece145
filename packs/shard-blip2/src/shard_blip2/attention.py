"""The attention of the tower of images, whose own forward counts heads in two ways."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.blip_2.modeling_blip_2 import eager_attention_forward

from shardcore.nn import ReplacedMethods
from shardcore.policy import Rule, Word


def _attend(self: Any, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Return what `Blip2Attention` returns for states (B, S, H), and attention weights (B, heads/tp, S, S).

    Its own forward takes the width of a head for that of its input, divided by the number of heads: of all heads there,
    and of this rank's heads in the same call. Here the width of a head is ``head_dim``. Written against transformers
    5.5.4 to 5.24, which are alike.
    """
    qkv = self.qkv(hidden_states)  # (B, S, 3 * H/tp)
    query, key, value = qkv.unflatten(-1, (3, -1, self.head_dim)).permute(2, 0, 3, 1, 4)  # each (B, heads/tp, S, D)
    interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
    dropout = self.attention_dropout if self.training else 0.0
    out, weights = interface(
        self, query, key, value, attention_mask=None, dropout=dropout, scaling=self.scale, **kwargs
    )
    return self.projection(out.flatten(2)), weights


class _Attention(ReplacedMethods):
    forward = _attend


def attends() -> Rule:
    """Return the rule by which an attention counts heads in one way."""
    return Word(text="attends()", planned=lambda scope: scope.swap("", _Attention))
