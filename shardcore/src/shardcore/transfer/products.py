"""Products of tokens while others of them travel.

Under sequence parallelism a region begins with a gather of tokens, which its column linears multiply, and ends with a
product whose sum is scattered. Both are done in pieces, each of some tokens of every rank: one is multiplied while the
next one travels (Wang et al. 2023, https://doi.org/10.1145/3567955.3567959). The numbers are those of one product,
bit for bit, where a kernel computes a row alike whatever rows are beside it.

torch has kernels of its own for the same (`torch.ops.symm_mem`), for cards that read each other's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from shardcore._private import KERNELS, TORCH
from shardcore.comm.collectives import Channel
from shardcore.comm.sequence import join_parts, stack_parts

#: Whether tokens travel beside products: not, in pieces, or by torch's kernels.
Overlap = Literal[False, True, "symm_mem"]

#: So many pieces at most, of which each has so many rows to multiply: a small product costs more than it hides.
_PIECES, _ROWS = 8, 512


def without_kernels(device_type: str) -> str | None:
    """Say why torch's kernels cannot be used, or return None: then they are defined."""
    if gone := TORCH.missing(KERNELS):
        return TORCH.complaint(gone)
    import torch.distributed._symmetric_memory  # noqa: F401  # defines them

    return None if device_type == "cuda" else f"symmetric memory is that of CUDA devices, and this is {device_type}"


def _pieces(own: Tensor, ranks: int) -> int:
    """Return in how many pieces tokens travel, given those of one rank, (B, L, ...)."""
    batch, step = own.shape[:2]
    return max(1, min(_PIECES, step, ranks * batch * step // _ROWS))


def gather_products(
    x: Tensor, linears: Sequence[tuple[Tensor, Tensor | None]], channel: Channel, length: int, overlap: Overlap
) -> tuple[Tensor, list[Tensor]]:
    """Gather ``length`` tokens, and multiply them: (B, L, in) to (B, S, in), and for each linear to (B, S, out).

    ``linears`` are weights (out, in) and biases (out). Eager mode only.
    """
    if overlap == "symm_mem" and not torch.is_autocast_enabled(x.device.type):
        group, weights = channel.group.group_name, [weight.t() for weight, _ in linears]
        whole, products = torch.ops.symm_mem.fused_all_gather_matmul(x.contiguous(), weights, 1, group)
        made = [p if b is None else p + b for p, (_, b) in zip(products, linears, strict=True)]
        whole, *made = (each.narrow(1, 0, length) for each in (whole, *made))
    else:
        pieces = x.chunk(_pieces(x, channel.size), 1)
        arrived, multiplied = [], [[] for _ in linears]  # type: ignore[var-annotated]
        for pending in [channel.start_all_gather(piece) for piece in pieces]:
            arrived.append(pending.wait())
            for products, (weight, bias) in zip(multiplied, linears, strict=True):
                products.append(F.linear(arrived[-1], weight, bias))
        whole, *made = (join_parts(torch.cat(parts, 2), length) for parts in (arrived, *multiplied))
    # A view that a `Function` returns may not be changed in place.
    return whole, [torch.ops.aten._unsafe_view(each, each.shape) for each in made]


def scatter_product(x: Tensor, weight: Tensor, channel: Channel, overlap: Overlap) -> Tensor:
    """Multiply by a weight (out, in), and sum over the ranks: (B, S, in) to this rank's tokens (B, L, out)."""
    parts = stack_parts(x, channel.size)
    if overlap == "symm_mem" and not torch.is_autocast_enabled(x.device.type):
        padded, group = parts.transpose(0, 1).flatten(1, 2), channel.group.group_name
        out: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(padded, weight.t(), "sum", 1, group)
        return out
    pieces = [piece.contiguous() for piece in parts.chunk(_pieces(parts[0], channel.size), 2)]  # else it is no mm
    return torch.cat([p.wait() for p in [channel.start_reduce_scatter(F.linear(each, weight)) for each in pieces]], 1)
