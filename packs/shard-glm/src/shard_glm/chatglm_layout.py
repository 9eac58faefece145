"""How ChatGLM2, whose activations are (S, B, H), runs its blocks on (B, S, H) and asks for tokens of other ranks."""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast

from shardcore.nn import ParallelMixin
from shardcore_transformers import sdpa


class Layout(ParallelMixin):
    """A module that does what it does in another layout, on one rank too."""

    keeps_name: ClassVar[bool] = True
    plan_needs_tp: ClassVar[bool] = False  # ranks of ``cp`` divide tokens too


class RowsFirstInside(Layout):
    """The stack: given (S, B, H) and rotations (S, B or 1, D / 4, 2), its blocks run on (B, S, ...)."""

    # Around whatever gathers what the blocks return.
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the native stack does: states (S, B, H), caches, captured states (S, B, H), and None."""
        out = super().__call__(*args, **kwargs)
        return _swapped(out.last_hidden_state), out.past_key_values, _swapped(out.hidden_states), out.attentions

    def forward(self, hidden_states: Tensor, attention_mask: Any, rotary_pos_emb: Tensor, **kwargs: Any) -> Any:
        """Return the outputs of the native stack for (B, S, H), by name."""
        out = super().forward(_swapped(hidden_states), attention_mask, _swapped(rotary_pos_emb), **kwargs)
        names = ("last_hidden_state", "past_key_values", "hidden_states", "attentions")
        return BaseModelOutputWithPast(**dict(zip(names, out, strict=True)))


class TokensFirstInside(Layout):
    """The attention of a block: given (B, S, H), it computes on (S, B, ...)."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Any, rotary_pos_emb: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Return what the native attention does, (B, S, H), and its cache."""
        # Its rotation is a scripted function, whose fuser knows no meta device, on which pipelines look for shapes.
        unfused: Any = torch.jit.optimized_execution  # type: ignore[attr-defined]  # it is documented, not in __all__
        with unfused(False) if hidden_states.is_meta else contextlib.nullcontext():
            return super().forward(_swapped(hidden_states), attention_mask, _swapped(rotary_pos_emb), *args, **kwargs)


class Attends(Layout):
    """Scaled dot products of (S, B, heads, D), to (B, S, heads * D), with the tokens of all ranks of ``cp``."""

    plan_attends: ClassVar[bool] = True

    def forward(self, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor, attention_mask: Any) -> Tensor:
        """Return what the native attention does, with tokens second; True in a mask hides a key."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query_layer, key_layer, value_layer))
        seen = None if attention_mask is None else ~attention_mask
        return sdpa(self, q, k, v, seen, is_causal=q.size(2) == k.size(2)).flatten(2)


def _swapped(value: Any) -> Any:
    """Swap tokens and rows of a tensor, or of each in a tuple."""
    if isinstance(value, tuple):
        return tuple(map(_swapped, value))
    return None if value is None else value.transpose(0, 1)
