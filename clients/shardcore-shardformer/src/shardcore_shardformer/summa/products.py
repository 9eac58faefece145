"""What a square of ranks computes together: linears by SUMMA, embeddings, norms.

SUMMA (van de Geijn and Watts 1997), in the form that multiplies by a transposed weight (Xu and You 2021,
https://arxiv.org/abs/2104.05343). Its q steps, each of which broadcasts a block along a row or a column, are one gather
here: as many bytes, in one collective, for one product of matrices. What is gathered lives as long as that product; for
the backward a rank keeps its own parts, and gathers weights again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

ROWS, COLUMNS = 0, 1  # the axes of the mesh


def layout(mesh: DeviceMesh, shape: Sequence[int]) -> tuple[Placement, Placement]:
    """Return how a tensor lies on the square: its first dim over the rows, its last one over the columns.

    A size that the ranks of an axis do not divide stays whole along it, and so does the one dim of a vector along rows.
    """
    last = len(shape) - 1
    over_rows = last > 0 and shape[0] > 0 and shape[0] % mesh.size(ROWS) == 0
    over_columns = last >= 0 and shape[last] > 0 and shape[last] % mesh.size(COLUMNS) == 0
    return Shard(0) if over_rows else Replicate(), Shard(last) if over_columns else Replicate()


def laid_out(x: DTensor) -> DTensor:
    """Return ``x`` in its `layout`; autograd records it, and its gradient comes to the placements of ``x``."""
    return x.redistribute(placements=layout(x.device_mesh, x.shape))


def _terms(along: Placement) -> Placement:
    """Return what sums over a dim that lies like ``along`` are: each rank's has its own terms, or is all of it."""
    return Partial() if isinstance(along, Shard) else Replicate()


def _made(part: Tensor, mesh: DeviceMesh, *placements: Placement) -> DTensor:
    return DTensor.from_local(part, mesh, placements, run_check=False)


def _whole_along_rows(weight: DTensor) -> Tensor:
    return weight.redistribute(placements=(Replicate(), weight.placements[COLUMNS])).to_local()


class Linear(torch.autograd.Function):
    """``x @ weight.T`` by SUMMA: (T, in), (out, in) -> (T, out), each in its `layout`.

    Forward: the weight is gathered along the rows, and the products are summed, and scattered, along the columns.
    Backward: the gradient of the output is gathered along the columns and the weight along the rows; the weight's
    gradient is summed, and scattered, along the rows. Each of q x q ranks sends ``(q - 1) / q**2`` times
    ``in * out + T * out`` values forward, and ``2 * in * out + T * out`` backward.
    """

    @staticmethod
    def forward(ctx: Any, x: DTensor, weight: DTensor) -> DTensor:
        """Multiply; ``x`` is in its layout."""
        ctx.save_for_backward(x, weight)
        part = F.linear(x.to_local(), _whole_along_rows(weight))
        return laid_out(_made(part, x.device_mesh, x.placements[ROWS], _terms(weight.placements[COLUMNS])))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor | None, DTensor | None]:
        """Return the gradients of both in their layouts."""
        x, weight = ctx.saved_tensors
        mesh, (rows, columns), of_x, of_weight = x.device_mesh, x.placements, None, None
        part = grad.redistribute(placements=(rows, Replicate())).to_local()
        if ctx.needs_input_grad[0]:
            of_x = _made(part @ _whole_along_rows(weight), mesh, rows, columns)
        if ctx.needs_input_grad[1]:
            product = part.flatten(0, -2).T @ x.to_local().flatten(0, -2)
            made = _made(product, mesh, _terms(rows), weight.placements[COLUMNS])
            of_weight = made.redistribute(placements=weight.placements)
        return of_x, of_weight


class Embedding(torch.autograd.Function):
    """Rows of a table: ids (T), which every rank has, of (V, H) -> (T, H).

    Each rank looks up all ids among its entries; what ranks of a column found is summed, and scattered, along the rows,
    and gathered in the backward: ``(q - 1) / q**2`` times ``T * H`` values each.
    """

    @staticmethod
    def forward(ctx: Any, table: DTensor, ids: Tensor, padding_idx: int | None) -> DTensor:
        """Look up."""
        mesh, (rows, columns), part = table.device_mesh, table.placements, table.to_local()
        held = part.shape[0]
        first = mesh.get_local_rank(ROWS) * held if isinstance(rows, Shard) else 0
        own, there = ids - first, (ids >= first) & (ids < first + held)
        # What is in no rank's part is out of range in everyone's, as it is in the whole table.
        index = own.masked_fill(~there, 0).masked_fill((ids < 0) | (ids >= table.shape[0]), held)
        found = F.embedding(index, part).masked_fill(~there.unsqueeze(-1), 0)
        skipped = torch.zeros_like(there) if padding_idx is None else ids == padding_idx
        ctx.save_for_backward(index, there & ~skipped)
        ctx.layout, ctx.mesh, ctx.held = table.placements, mesh, held
        ctx.along = Shard(ids.ndim) if isinstance(columns, Shard) else Replicate()
        return laid_out(_made(found, mesh, _terms(rows), ctx.along))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor, None, None]:
        """Return the gradient of the table in its layout."""
        index, counts = ctx.saved_tensors
        part = grad.redistribute(placements=(Replicate(), ctx.along)).to_local()
        of_table = part.new_zeros(ctx.held, part.shape[-1])
        of_table.index_add_(0, index.flatten(), part.masked_fill(~counts.unsqueeze(-1), 0).flatten(0, -2))
        return _made(of_table, ctx.mesh, *ctx.layout), None, None


class Normalized(torch.autograd.Function):
    """``x`` over its deviation (or, without ``centers``, its root mean square) along the last dim.

    Statistics of 16-bit values, and the result, are in float32. Along the columns ranks sum one value of each token for
    the mean and one for the deviation; in the backward one for each at once.
    """

    @staticmethod
    def forward(ctx: Any, x: DTensor, eps: float, centers: bool) -> DTensor:
        """Normalize; ``x`` is in its layout."""
        part, size = x.to_local(), x.shape[-1]
        part = part.float() if part.itemsize < 4 else part
        if centers:
            part = part - _mean(x, part.sum(-1, keepdim=True) / size)
        inverse = torch.rsqrt(_mean(x, part.square().sum(-1, keepdim=True) / size) + eps)
        made = _made(part * inverse, x.device_mesh, *x.placements)
        ctx.save_for_backward(made, inverse)
        ctx.centers, ctx.dtype = centers, x.dtype
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor, None, None]:
        """Return the gradient of ``x``."""
        made, inverse = ctx.saved_tensors
        part, own, size = grad.redistribute(placements=made.placements).to_local(), made.to_local(), made.shape[-1]
        sums = [(part * own).sum(-1, keepdim=True), *([part.sum(-1, keepdim=True)] if ctx.centers else [])]
        along, *mean = _mean(made, torch.cat(sums, -1) / size).split(1, -1)
        of_x = inverse * (part - own * along - (mean[0] if mean else 0))
        return _made(of_x.to(ctx.dtype), made.device_mesh, *made.placements), None, None


def _mean(x: DTensor, terms: Tensor) -> Tensor:
    """Return the sums along the columns of what ranks have of their features of ``x``."""
    rows, columns = x.placements
    return _made(terms, x.device_mesh, rows, _terms(columns)).redistribute(placements=(rows, Replicate())).to_local()


def normalized(x: DTensor, weight: DTensor | None, bias: DTensor | None, eps: float, centers: bool) -> DTensor:
    """Return a norm along the last dim of ``x``, with its weight and bias, in the dtype of ``x``."""
    out: Any = Normalized.apply(laid_out(x), eps, centers)  # type: ignore[no-untyped-call]  # untyped in torch
    out = out if weight is None else out * weight
    out = out if bias is None else out + bias
    return cast("DTensor", out.to(x.dtype))
