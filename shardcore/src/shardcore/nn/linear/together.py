"""What column linears use of parameters that ranks share, read for all members of a region at once.

There are two kinds of them: rows that neighbours gather (a KV head that they share), and full parameters of which a
rank uses some rows (the bias of a fused linear; KV heads that cannot be cut evenly). Both cost collectives. These have
to follow from the plan alone, so the entry of a region reads for all its members, even for one that a hook keeps off
the region's fast path on one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardcore.comm.dtensor_params import held, local_tensor, read_partial
from shardcore.comm.neighbours import gather_rows
from shardcore.comm.strided import Runs
from shardcore.mesh import ShardContext

if TYPE_CHECKING:
    from shardcore.nn.linear.parallel import ColumnLinear

__all__ = ["Reading", "read_together", "take_rows"]


class Reading:
    """What the entry of a region has read for one member.

    An exception inside the region leaves it on the member, so it says whether the parameters have changed since.
    """

    def __init__(self, member: ColumnLinear, parameters: tuple[Tensor, ...]) -> None:
        self.parameters = parameters
        self._versions = _versions(member)

    def is_of(self, member: ColumnLinear) -> bool:
        """Tell whether the parameters of ``member`` are what they were."""
        return self._versions == _versions(member)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # tensors with a graph cannot be copied, and a copy of the model is in no region


def _versions(member: ColumnLinear) -> list[int]:
    # An operation on a DTensor counts there, one on its local part here.
    tensors = (t for parameter in member.own_parameters for t in (parameter, local_tensor(parameter)))
    return [0 if t.is_inference() else t._version for t in tensors]


def read_together(context: ShardContext, members: Sequence[ColumnLinear]) -> list[tuple[Tensor, ...]]:
    """Return for each member the weight and the bias (if there is one) that this rank multiplies with.

    Collectives: an all-gather for each number of neighbours that gather, and its reduce-scatter in the backward; an
    all-reduce in the backward for all whole parameters. Parameters of which this rank has its part to itself are
    returned as they are.
    """
    used = [list(member.own_parameters) for member in members]
    for member in members:
        held(member.weight)
    for count in dict.fromkeys(member.group_size for member in members if member.group_size > 1):
        places = [(i, j) for i, member in enumerate(members) if member.group_size == count for j in range(len(used[i]))]
        rows = gather_rows(context.among(count), *(used[i][j] for i, j in places))
        for (i, j), tensor in zip(places, rows, strict=True):
            used[i][j] = tensor
    cut = [
        (i, j, runs)
        for i, member in enumerate(members)
        for j, runs in enumerate((member.rows, member.bias_rows)[: len(used[i])])
        if runs is not None
    ]
    if cut:
        whole = read_partial(context.channel, *(used[i][j] for i, j, _ in cut), deferred=context.defers)
        for (i, j, runs), tensor in zip(cut, whole, strict=True):
            used[i][j] = take_rows(tensor, runs)
    return [tuple(tensors) for tensors in used]


def take_rows(whole: Tensor, runs: Runs) -> Tensor:
    """Return the ``runs`` of rows of ``whole``, one after the other: a view if there is one run only."""
    parts = [whole[start:stop] for start, stop in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
