"""Masks of `torch.nn.MultiheadAttention`, in the shapes that its function takes, as what is added to scores.

Shapes: B rows, L queries, S keys, H heads.
"""

from __future__ import annotations

import torch
from torch import Tensor


def of_queries(mask: Tensor, scores: tuple[int, int, int, int]) -> Tensor:
    """Return a mask (L, S) as (1, 1, L, S), one (B * H, L, S) as (B, H, L, S).

    Raises:
        RuntimeError: it has another shape.
    """
    rows, heads, queries, keys = scores
    if mask.shape == (queries, keys):
        return mask[None, None]
    if mask.shape == (rows * heads, queries, keys):
        return mask.reshape(scores)
    wanted = f"({queries}, {keys}) or ({rows * heads}, {queries}, {keys}), which is batch * all heads"
    raise RuntimeError(f"attn_mask has the shape {tuple(mask.shape)}; wanted {wanted}")


def of_keys(mask: Tensor, rows: int, keys: int) -> Tensor:
    """Return a mask (B, S), or (S) without a batch, as (B, 1, 1, S).

    Raises:
        RuntimeError: it has another shape.
    """
    if mask.shape not in ((rows, keys), (keys,) if rows == 1 else (rows, keys)):
        raise RuntimeError(f"key_padding_mask has the shape {tuple(mask.shape)}; wanted ({rows}, {keys})")
    return mask.reshape(rows, 1, 1, keys)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what is added to scores: of a mask of bools, minus infinity where it is True.

    Raises:
        RuntimeError: it holds whole numbers.
    """
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
    if not mask.is_floating_point():
        raise RuntimeError(f"masks of attention are bool or floating, not {mask.dtype}")
    return mask
