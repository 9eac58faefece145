"""Attention of some queries to some keys, with the logsumexp that puts several such blocks together exactly.

Shapes: queries (B, H, Lq, D), keys (B, K, Lk, D) and values (B, K, Lk, E) with H a multiple of K; outputs
(B, H, Lq, E), logsumexp (B, H, Lq).
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

#: Consecutive tokens of a call: (first, one past the last).
Span = tuple[int, int]

# Numbers of a block of scores, where no kernel of torch keeps them to itself.
_SCORES = 1 << 26


class TokenMask:
    """Which tokens of a call see which, without a tensor of S x S.

    Args:
        kind: ``"causal"`` where each token sees itself and all before it, ``"full"`` where it sees all; ``"other"``.
    """

    def __init__(self, kind: Literal["causal", "full", "other"]) -> None:
        self.kind = kind
        self._empty: dict[tuple[Span, Span], bool] = {}  # the same for all layers and in the backward

    def empty(self, queries: Span, keys: Span, device: torch.device) -> bool:
        """Tell whether none of some consecutive queries sees any of some consecutive keys."""
        if self.kind != "other":
            return self.kind == "causal" and keys[0] >= queries[1]
        if (queries, keys) not in self._empty:
            seen = self.block(torch.arange(*queries, device=device), torch.arange(*keys, device=device))
            self._empty[queries, keys] = not bool((seen if seen.dtype == torch.bool else ~seen.isneginf()).any())
        return self._empty[queries, keys]

    @abstractmethod
    def block(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return what tokens at these positions, (Lq) and (Lk), see: (B or 1, H or 1, Lq, Lk).

        Booleans, True where they do, or numbers that are added to the scores.
        """


class Block(NamedTuple):
    """Of which queries and keys a block is, and the mask between them."""

    queries: Span
    keys: Span
    mask: TokenMask

    def seen(self, like: Tensor) -> tuple[bool, Tensor | None]:
        """Return whether it is causal within itself, and what is added to its scores besides, in the dtype of ``like``.

        The latter is None where nothing is.
        """
        causal = self.mask.kind == "causal"
        diagonal = causal and self.queries == self.keys
        if self.mask.kind == "full" or diagonal or (causal and self.keys[1] <= self.queries[0] + 1):
            return diagonal, None
        seen = self.mask.block(*(torch.arange(*span, device=like.device) for span in (self.queries, self.keys)))
        if seen.dtype == torch.bool:
            seen = torch.zeros_like(seen, dtype=like.dtype).masked_fill_(~seen, float("-inf"))
        return diagonal, seen.to(like.dtype)


def _repeated(x: Tensor, heads: int) -> Tensor:
    return x if x.size(1) == heads else x.repeat_interleave(heads // x.size(1), 1)


def _summed(x: Tensor, heads: int) -> Tensor:
    return x if x.size(1) == heads else x.unflatten(1, (heads, -1)).sum(2)


def _by_cpu_kernel(q: Tensor, v: Tensor) -> bool:
    return q.device.type == "cpu" and q.size(-1) == v.size(-1)


def attend_block(q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float) -> tuple[Tensor, Tensor]:
    """Return the output and the logsumexp of a block; 0 and -inf where a query sees nothing of it."""
    k, v = (_repeated(x, q.size(1)) for x in (k, v))
    diagonal, added = block.seen(q)
    if _by_cpu_kernel(q, v):
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = kernel(q, k, v, 0.0, diagonal, attn_mask=added, scale=scale)
    else:
        out, lse = _attend(q, k, v, added, scale, diagonal=diagonal)
    if added is None:
        return out, lse
    blind = added.isneginf().all(-1)  # queries that see nothing of the block, (B, H or 1, Lq)
    return out.masked_fill(blind.unsqueeze(-1), 0), lse.masked_fill(blind, float("-inf"))


def attend_block_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: Block, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a block adds to the gradients of its queries, keys and values.

    Args:
        grad: of the output of the queries, over all their blocks.
        q: the queries.
        k: the keys.
        v: the values.
        out: the output of the queries, over all their blocks.
        lse: their logsumexp, over all their blocks; any number where they see nothing at all.
        block: what they are.
        scale: of the scores.
    """
    heads = k.size(1)
    k, v = (_repeated(x, q.size(1)) for x in (k, v))
    diagonal, added = block.seen(q)
    if _by_cpu_kernel(q, v):
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = kernel(grad, q, k, v, out, lse, 0.0, diagonal, attn_mask=added, scale=scale)
    else:
        dq, dk, dv = _attend_backward(grad, q, k, v, out, lse, added, scale, diagonal=diagonal)
    return dq, _summed(dk, heads), _summed(dv, heads)


def _scores(q: Tensor, k: Tensor, added: Tensor | None, rows: slice, scale: float, *, diagonal: bool) -> Tensor:
    """Return the scores of some rows, in float32 or wider."""
    scores = (q[:, :, rows] @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * scale
    if added is not None:
        scores = scores + (added if added.size(2) == 1 else added[:, :, rows])
    if diagonal:
        after = torch.ones(q.size(2), k.size(2), dtype=torch.bool, device=q.device).triu(1)[rows]
        scores = scores.masked_fill(after, float("-inf"))
    return scores


def _rows(q: Tensor, k: Tensor) -> list[slice]:
    step = max(1, _SCORES // max(1, q.size(0) * q.size(1) * k.size(2)))
    return [slice(start, start + step) for start in range(0, q.size(2), step)]


def _attend(q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, scale: float, **how: Any) -> tuple[Tensor, Tensor]:
    found = []
    for rows in _rows(q, k):
        scores = _scores(q, k, added, rows, scale, **how)
        lse = scores.logsumexp(-1)
        found.append(((scores - lse.masked_fill(lse.isneginf(), 0).unsqueeze(-1)).exp().to(v.dtype) @ v, lse))
    return torch.cat([out for out, _ in found], 2), torch.cat([lse for _, lse in found], 2)


def _attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    added: Tensor | None,
    scale: float,
    **how: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    delta = (grad * out).to(lse.dtype).sum(-1, keepdim=True)
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows in _rows(q, k):
        weights = (_scores(q, k, added, rows, scale, **how) - lse[:, :, rows].unsqueeze(-1)).exp()
        dv += weights.to(grad.dtype).mT @ grad[:, :, rows]
        inner = (weights * ((grad[:, :, rows] @ v.mT).to(lse.dtype) - delta[:, :, rows]) * scale).to(q.dtype)
        dq[:, :, rows] = inner @ k
        dk += inner.mT @ q[:, :, rows]
    return dq, dk, dv


def no_output(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and the logsumexp of queries that have seen no block yet, in float32 or wider."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(*q.shape[:3], v.size(-1), dtype=dtype)
    return out, q.new_full(q.shape[:3], float("-inf"), dtype=dtype)


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Add a further block to the output and the logsumexp of queries, in place."""
    both = torch.logaddexp(lse, more_lse)
    known = both.masked_fill(both.isneginf(), 0)  # a query that has seen nothing: no -inf minus -inf
    out.mul_((lse - known).exp().unsqueeze(-1)).add_((more_lse - known).exp().unsqueeze(-1) * more)
    lse.copy_(both)
