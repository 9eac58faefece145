"""Parallel linears as others know them: the module that one was, and the region that it belongs to.

Column linears use parameters that ranks share: rows that neighbours gather (a KV head that they share), rows that all
ranks exchange (whole heads, where each holds another part), and full parameters of which a rank uses some rows (the
bias of a fused linear; KV heads that cannot be cut evenly). All cost collectives. These have to follow from the plan
alone, so the entry of a region reads for all its members at once, even for one that a hook keeps off the region's fast
path on one rank.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from shardcore.comm.dtensor_params import expect_dtensor, local_tensor, read_partial
from shardcore.comm.exchange import Exchange, exchange_rows, gather_rows
from shardcore.comm.strided import Runs
from shardcore.mesh.context import ShardContext
from shardcore.nn.base import ParallelMixin
from shardcore.nn.costs import Collective, Site, backward, forward
from shardcore.nn.layout import ExchangedLayout, GroupShardedLayout, ReplicatedLayout
from shardcore.nn.linear.alike import Product, product_of
from shardcore.nn.mixin import native_class


class ParallelLinear(ParallelMixin):
    """What column and row linears have in common: the native module is a `torch.nn.Linear`, or computes what one does.

    A class of another library whose forward is the same product (FalconLinear), or that of a weight (in, out)
    (Conv1D), is recognized by trying it (`shardcore.nn.linear.alike`).
    """

    in_features: int
    out_features: int
    weight: Tensor
    bias: Tensor | None
    #: Whether the weight is (in, out), not (out, in).
    transposed: bool
    _shard_context: ShardContext

    @classmethod
    @override
    def plan_kind_problem(cls, module: nn.Module) -> str | None:
        if isinstance(product := product_of(module), Product):
            return None
        given = f"{type(module).__module__}.{type(module).__qualname__}"
        return (
            f"{cls.__name__} replaces torch.nn.modules.linear.Linear, got {given}, which does not compute the same: "
            f"{product}; replicate it, or bring a ParallelModule for it"
        )

    @staticmethod
    def computes(module: nn.Module) -> Product:
        """Return what a module multiplies, of which `plan_kind_problem` was None before it got mixins."""
        found = product_of(module, native_class(type(module)))
        assert isinstance(found, Product)
        return found

    @classmethod
    @override
    def swap_class(cls, module: nn.Module, context: ShardContext, **options: Any) -> Self:
        product = cls.computes(module)
        new = super().swap_class(module, context)
        new.in_features, new.out_features = product.in_features, product.out_features
        new.transposed = product.transposed
        return new

    __repr__ = nn.Module.__repr__

    def extra_repr(self) -> str:
        """Describe the full linear and the number of ranks."""
        form = ", weight=(in, out)" if self.transposed else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}{form}, "
            f"tp={self._shard_context.size}"
        )


class Reading:
    """What the entry of a region has read for one member, or for a module beside the members.

    An exception inside the region leaves it on the member, so it says whether the parameters have changed since.
    """

    def __init__(self, own: Sequence[Tensor], parameters: tuple[Tensor, ...]) -> None:
        self.parameters = parameters
        self._versions = _versions(own)

    def is_of(self, own: Sequence[Tensor]) -> bool:
        """Tell whether the parameters of the member are what they were."""
        return self._versions == _versions(own)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # tensors with a graph cannot be copied, and a copy of the model is in no region


def _versions(own: Sequence[Tensor]) -> list[int]:
    # An operation on a DTensor counts there, one on its local part here.
    tensors = (t for parameter in own for t in (parameter, local_tensor(parameter)))
    return [0 if t.is_inference() else t._version for t in tensors]


class Member(ParallelLinear):
    """A column linear, as far as the entry of its region multiplies and reads for it (`shardcore.nn.region`)."""

    #: How many neighbouring ranks gather the rows that they use from the parts that they hold; 1 for none.
    group_size: int
    #: How ranks get the rows that they use from those that hold them; None if each uses what it or a group holds.
    exchange: Exchange | None
    #: While its region is open: what the region's entry has read for it, if ranks share its parameters.
    reading: Reading | None
    #: The rows of the weight that this rank uses if its local tensor has others too, else None.
    rows: Runs | None
    #: Likewise of the bias.
    bias_rows: Runs | None

    @property
    def uses_what_it_holds(self) -> bool:
        """Tell whether the local tensors have the rows that this rank uses, and no others."""
        return self.group_size == 1 and self.exchange is None and self.rows is None and self.bias_rows is None

    @property
    def own_parameters(self) -> tuple[Tensor, ...]:
        """The weight, and the bias if there is one, as this rank holds them."""
        weight, bias = self.weight, self.bias
        return (weight,) if bias is None else (weight, bias)

    @abstractmethod
    def product(self, x: Tensor) -> Tensor:
        """Multiply by this rank's rows, outside the fast path of a region: (..., in) to (..., out/tp)."""
        raise NotImplementedError


def read_together(
    context: ShardContext, members: Sequence[Member], beside: Sequence[tuple[Tensor, ...]] = ()
) -> list[tuple[Tensor, ...]]:
    """Return for each member of a region the weight and the bias (if there is one) that this rank multiplies with.

    Full parameters of modules ``beside`` them inside of it are returned after those of the members.

    Collectives: an all-gather for each number of neighbours that gather, and its reduce-scatter in the backward; an
    all-to-all for all rows that are exchanged, and the opposite one in the backward; an all-reduce in the backward for
    all full parameters. Parameters of which this rank alone has its part are returned as they are.
    """
    own = [member.own_parameters for member in members]
    used = {(i, j): parameter for i, parameters in enumerate(own) for j, parameter in enumerate(parameters)}
    for member in members:
        expect_dtensor(member.weight)
    for count in dict.fromkeys(member.group_size for member in members if member.group_size > 1):
        places = [place for place in used if members[place[0]].group_size == count]
        rows = gather_rows(context.among(count), *(used[place] for place in places))
        used.update(zip(places, rows, strict=True))
    exchanges = {place: members[place[0]].exchange for place in used}
    moving = {place: exchange for place, exchange in exchanges.items() if exchange is not None}
    if moving:
        found = exchange_rows(context.channel, list(moving.values()), [used[place] for place in moving])
        used.update(zip(moving, found, strict=True))
    some = {(i, j): members[i].bias_rows if j else members[i].rows for i, j in used}
    cut = {place: runs for place, runs in some.items() if runs is not None}
    others = [parameter for parameters in beside for parameter in parameters]
    if cut or others:
        whole = read_partial(context.channel, *(used[place] for place in cut), *others, deferred=context.defers)
        used.update((place, take_rows(tensor, cut[place])) for place, tensor in zip(cut, whole, strict=False))
        others = list(whole[len(cut) :])
    read = iter((*used.values(), *others))
    return [tuple(itertools.islice(read, len(parameters))) for parameters in (*own, *beside)]


def take_rows(full: Tensor, runs: Runs) -> Tensor:
    """Return the ``runs`` of rows of ``full``, one after the other: a view if there is one run only."""
    parts = [full[start:stop] for start, stop in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def shared_parameters(where: str, members: Sequence[Site], beside: Sequence[str] = ()) -> Iterator[Collective]:
    """Yield the collectives of parameters of column linears that several ranks use.

    The entry ``where`` of their region sends for all of them, and for the modules ``beside`` them inside of it.
    """
    layouts = {site.path: {site.layout(short) for short in ("weight", "bias")} for site in members}
    every = [layout for found in layouts.values() for layout in found]
    for size in sorted({layout.group_size for layout in every if isinstance(layout, GroupShardedLayout)}):
        names = ", ".join(name for name, found in layouts.items() if GroupShardedLayout(0, size) in found)
        yield forward(where, "all_gather", f"parts of {names} among {size} ranks")
        yield backward(where, "reduce_scatter", f"gradients of {names} among {size} ranks")
    moved = ", ".join(name for name, found in layouts.items() if ExchangedLayout(0) in found)
    if moved:
        yield forward(where, "all_to_all", f"rows of {moved}")
        yield backward(where, "all_to_all", f"gradients of rows of {moved}")
    summed = [name for name, found in layouts.items() if ReplicatedLayout(partial_gradient=True) in found]
    if (summed or beside) and members[0].sums_at_once:
        yield backward(where, "all_reduce", f"gradients of {', '.join([*summed, *beside])}")
