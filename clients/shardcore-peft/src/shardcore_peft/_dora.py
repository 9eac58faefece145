"""DoRA: a magnitude for each row of a weight, over the norm of the whole row, of which a rank may have a part.

The norms need W + BA, of which each rank has what its base has: some rows, whose norms are its own; or some columns,
whose squares are summed over the ranks. PEFT computes them without gradients (Liu et al. 2024, section 4.3,
https://arxiv.org/abs/2402.09353), so that this sum is sent in the forward alone: one number for each row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from shardcore.comm.collectives import chunk_bounds, gather_from_tp
from shardcore.comm.dtensor_params import local_tensor, read_local, read_partial
from shardcore.comm.exchange import exchange_rows, gather_rows
from shardcore.comm.parts import part_of
from shardcore.comm.strided import Runs
from shardcore.mesh.context import ShardContext
from shardcore.nn import ColumnLinear, Layout, Replicated, ReplicatedLayout, RowLinear, ShardedLayout, VocabEmbedding
from shardcore.nn.linear.functional import as_out_in, multiply
from shardcore.nn.linear.members import take_rows
from shardcore.nn.sequence.shard import enter_region
from shardcore_peft._around import whole_base
from shardcore_peft._merging import of_whole_tensors


class Magnitude(Replicated):
    """The magnitudes (out) of one adapter, and what they add to the output of its base.

    At a replicated base the native forward runs. At the others this one computes what it does, of what the rank has.

    Options:
        split: whether each rank has the magnitudes of its part of the rows.
        used: the rows whose magnitudes this rank uses, if all ranks have all.
        partial: as of `Replicated`.
    """

    option_names = frozenset({"partial", "split", "used"})

    @classmethod
    @override
    def layouts(
        cls, module: nn.Module, ranks: int, *, split: bool = False, partial: bool = False, **options: Any
    ) -> Mapping[str, Layout]:
        return {"weight": ShardedLayout(0) if split else ReplicatedLayout(partial_gradient=partial)}

    @classmethod
    @override
    def swap_class(cls, module: nn.Module, context: ShardContext, *, used: Runs | None = None, **options: Any) -> Self:
        new = super().swap_class(module, context, partial=bool(options.get("partial")))
        new.__dict__["_used"] = used
        return new

    def forward(self, x: Tensor, **given: Any) -> Any:
        """Return what PEFT adds to the output of the base; takes what PEFT's own takes."""
        base = whole_base(given["base_layer"])
        if not isinstance(base, ColumnLinear | RowLinear | VocabEmbedding):
            return super().forward(x, **given)
        first, second, scaling = given["lora_A"], given["lora_B"], given["scaling"]
        (magnitude,) = self._read(self._parameters, fresh=False).values()
        if isinstance(base, VocabEmbedding):
            scale = magnitude / _norms_of_columns(base, first.t(), second.t(), scaling)
            return scale, scale * (given["embed_fn"](x, first) @ second) * scaling
        scale = magnitude / self._norms(base, first.weight, second.weight, scaling, x.dtype)
        of_base = given.get("base_result")
        if of_base is None:  # of what a dropout has left of the input
            of_base = _again(base, x)
        elif isinstance(base, ColumnLinear) and base.bias is not None:
            of_base = of_base - _used_of(base, base.bias, base.bias_rows).to(of_base.dtype)
        return (scale - 1) * of_base + scale * second(first(x)) * scaling

    def _norms(
        self, base: ColumnLinear | RowLinear, first: Tensor, second: Tensor, scaling: float, dtype: torch.dtype
    ) -> Tensor:
        """Return the norms of the rows of W + scaling * BA that this rank computes, without a gradient.

        Args:
            base: has W, of which this rank has a part.
            first: A (r, in), or this rank's part of it.
            second: B (out, r), likewise.
            scaling: see above.
            dtype: in which they are added.
        """
        context, used = base._shard_context, self._used
        weight, first, second = (local_tensor(tensor).detach() for tensor in (base.weight, first, second))
        weight = as_out_in(weight, base.transposed).to(dtype)
        if isinstance(base, RowLinear):
            if base.exchange is not None:  # A is whole, and of W there is what this rank holds, not what it uses
                first = first[:, slice(*chunk_bounds(base.in_features, context.size, context.rank))]
            return _summed(weight, second @ first, scaling, context, dim=1)
        if base.rows is not None and used is not None:
            weight = take_rows(weight, used)
        if used is None or (base.group_size == 1 and base.exchange is None):
            return _norms(weight, (second if used is None else take_rows(second, used)) @ first, scaling)
        second = second[slice(*chunk_bounds(base.out_features, context.size, context.rank))]
        held = _norms(weight, second @ first, scaling)
        return take_rows(gather_from_tp(held, context.channel.exact, 0, base.out_features), used)


def begin_with_norms(layer: Any, name: str) -> None:
    """Let PEFT set the magnitudes of an adapter, on whole tensors: to the norms of the base of ``layer`` with it."""
    magnitude = layer.lora_magnitude_vector[name]
    parameter = magnitude._parameters["weight"]
    with of_whole_tensors(layer):
        table = name in layer.lora_embedding_A
        held = (layer.lora_embedding_A, layer.lora_embedding_B) if table else (layer.lora_A, layer.lora_B)
        first, second = (each[name] if table else each[name].weight for each in held)
        base = layer.get_base_layer()
        magnitude.update_layer(base_layer=base, lora_A=first, lora_B=second, scaling=layer.scaling[name])
        found = magnitude._parameters["weight"].detach()
        magnitude._parameters["weight"] = parameter
    with torch.no_grad():
        parameter.copy_(part_of(found, parameter) if isinstance(parameter, DTensor) else found)


def _norms(weight: Tensor, added: Tensor, scaling: float) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(weight + scaling * added.to(weight.dtype), dim=1)
    return found


def _norms_of_columns(base: VocabEmbedding, first: Tensor, second: Tensor, scaling: float) -> Tensor:
    """Return the norms of the columns of a table, which PEFT takes: A is (r, V), B (H, r)."""
    weight, first, second = (local_tensor(tensor).detach() for tensor in (base.weight, first, second))
    return _summed(weight, (second @ first[:, slice(*base.rows)]).t(), scaling, base._shard_context, dim=0)


def _summed(weight: Tensor, added: Tensor, scaling: float, context: ShardContext, *, dim: int) -> Tensor:
    """Return norms along ``dim``, of which each rank has a part."""
    total = weight + scaling * added
    squares = total.to(torch.promote_types(total.dtype, torch.float32)).square().sum(dim)
    return context.channel.exact.all_reduce(squares).sqrt().to(total.dtype)


def _again(base: ColumnLinear | RowLinear, x: Tensor) -> Tensor:
    """Return this rank's part of what ``base`` makes of ``x``, without a bias."""
    if isinstance(base, RowLinear):
        return base.local(x)
    tokens = None if base.sole_region is None else base.sole_region.sequence
    if base.sole_region is not None or base.enters_alone:
        x = enter_region(x, base._shard_context.channel, tokens, "an adapter")
    return multiply(x, _used_of(base, base.weight, base.rows), transposed=base.transposed)


def _used_of(base: ColumnLinear, parameter: Tensor, rows: Runs | None) -> Tensor:
    """Return the rows of a parameter of ``base`` that this rank computes with."""
    context = base._shard_context
    if rows is not None:
        (whole,) = read_partial(context.channel, parameter, deferred=context.defers)
        return take_rows(whole, rows)
    if base.group_size > 1:
        return gather_rows(context.among(base.group_size), parameter)[0]
    if base.exchange is not None:
        return exchange_rows(context.channel, [base.exchange], [parameter])[0]
    return read_local(parameter)[0]
