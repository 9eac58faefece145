"""What column linears use of parameters that ranks share, read for all members of a region at once.

There are three kinds of them: rows that neighbours gather (a KV head that they share), rows that all ranks exchange
(whole heads, where each holds another part), and full parameters of which a rank uses some rows (the bias of a fused
linear; KV heads that cannot be cut evenly). All cost collectives. These have
to follow from the plan alone, so the entry of a region reads for all its members, even for one that a hook keeps off
the region's fast path on one rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shardcore.comm.dtensor_params import expect_dtensor, read_partial
from shardcore.comm.exchange import exchange_rows
from shardcore.comm.neighbours import gather_rows
from shardcore.comm.strided import Runs
from shardcore.mesh import ShardContext
from shardcore.nn.costs import Collective, Site, backward, forward
from shardcore.nn.layout import ExchangedLayout, GroupShardedLayout, ReplicatedLayout
from shardcore.nn.linear.member import Member

__all__ = ["read_together", "shared_parameters", "take_rows"]


def read_together(
    context: ShardContext, members: Sequence[Member], beside: Sequence[tuple[Tensor, ...]] = ()
) -> list[tuple[Tensor, ...]]:
    """Return for each member the weight and the bias (if there is one) that this rank multiplies with.

    Args:
        context: of the sharded model.
        members: the column linears of a region.
        beside: full parameters of other modules inside of it, which are returned after those of the members.

    Collectives: an all-gather for each number of neighbours that gather, and its reduce-scatter in the backward; an
    all-to-all for all rows that are exchanged, and the opposite one in the backward; an all-reduce in the backward for
    all full parameters. Parameters of which this rank alone has its part are
    returned as they are.
    """
    used = [list(member.own_parameters) for member in members]
    for member in members:
        expect_dtensor(member.weight)
    for count in dict.fromkeys(member.group_size for member in members if member.group_size > 1):
        places = [(i, j) for i, member in enumerate(members) if member.group_size == count for j in range(len(used[i]))]
        rows: Sequence[Tensor] = gather_rows(context.among(count), *(used[i][j] for i, j in places))
        for (i, j), tensor in zip(places, rows, strict=True):
            used[i][j] = tensor
    exchanges = [e for e, tensors in zip((m.exchange for m in members), used, strict=True) if e for _ in tensors]
    if exchanges:
        moving = [(i, j) for i, member in enumerate(members) if member.exchange for j in range(len(used[i]))]
        found = exchange_rows(context.channel, exchanges, [used[i][j] for i, j in moving])
        for (i, j), tensor in zip(moving, found, strict=True):
            used[i][j] = tensor
    cut = [
        (i, j, runs)
        for i, member in enumerate(members)
        for j, runs in enumerate((member.rows, member.bias_rows)[: len(used[i])])
        if runs is not None
    ]
    others = [parameter for parameters in beside for parameter in parameters]
    if not cut and not others:
        return [tuple(tensors) for tensors in used]
    whole = read_partial(context.channel, *(used[i][j] for i, j, _ in cut), *others, deferred=context.defers)
    for (i, j, runs), tensor in zip(cut, whole, strict=False):
        used[i][j] = take_rows(tensor, runs)
    rest = iter(whole[len(cut) :])
    return [*map(tuple, used), *(tuple(next(rest) for _ in parameters) for parameters in beside)]


def take_rows(full: Tensor, runs: Runs) -> Tensor:
    """Return the ``runs`` of rows of ``full``, one after the other: a view if there is one run only."""
    parts = [full[start:stop] for start, stop in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def shared_parameters(where: str, members: Sequence[Site], beside: Sequence[str] = ()) -> Iterator[Collective]:
    """Yield the collectives of parameters of column linears that several ranks use.

    Args:
        where: the entry of their region, which sends for all of them.
        members: the places of the linears.
        beside: other modules inside of it whose gradients are summed with theirs.
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
