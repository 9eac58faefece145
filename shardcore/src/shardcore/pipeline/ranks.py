"""Who takes part in a pipeline: this rank's place in it, who has to hear of a failure, and who gets outputs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from shardcore.agree.agreement import Report, agree
from shardcore.comm.dtensor_params import local_tensor
from shardcore.mesh.axes import axis_name, group_of
from shardcore.mesh.context import ShardContext
from shardcore.pipeline.metadata import filled, form_of


class PipelineRanks:
    """This rank's place on the axis ``pp``, and the ranks around it. Every rank of the mesh makes one.

    Attributes:
        group: the ranks of the pipeline, which pass micro-batches on to each other.
        rank: this rank's position among them.
        size: how many they are.
    """

    def __init__(self, context: ShardContext) -> None:
        axis = context.axis("pp")
        self.group: ProcessGroup = axis.group
        self.rank, self.size = axis.rank, axis.size
        self._context, self._everybody = context, group_of(context.mesh)
        names = tuple(name for name in ("pp", "cp", "tp") if axis_name(context.mesh, name) is not None)
        # Ranks that are given one batch: those of one replica.
        self._alike = self._everybody if context.sizes.replicas == 1 else group_of(context.mesh[names])

    def begin(self, failure: BaseException | None, told: Sequence[tuple[str, str]], number: int) -> int:
        """Raise on all ranks if one of them has a ``failure``, or if those of one replica were ``told`` other things.

        Each rank has drawn a ``number``: that of the first rank of the replica is returned.

        Raises:
            AgreementError: another rank failed, or they differ.
        """
        report = Report(items=tuple(told), seed=number)
        if self._context.sizes.replicas == 1:
            return agree(report, failure, group=self._everybody)[0].seed
        try:
            number = agree(report, failure, group=self._alike)[0].seed
        except BaseException as error:
            failure = error
        self.agree(failure)
        return number

    def agree(self, failure: BaseException | None) -> None:
        """Raise on all ranks if one of them has a ``failure``."""
        agree(failure=failure, group=self._everybody)

    def broadcast(self, out: Any, source: int, missing: Collection[int]) -> Any:
        """Return ``out``, an output of the model at the position ``source``, on every rank of the pipeline.

        Leaves that are ``missing``, since earlier stages compute them, are None.
        """
        told: list[Any] = [None]
        tensors: list[Tensor] = []
        if self.rank == source:
            leaves, tree = tree_flatten(out)
            leaves = [None if place in missing else leaf for place, leaf in enumerate(leaves)]
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            told = [tree_map_only(Tensor, _Sent, tree_unflatten(leaves, tree))]
        dist.broadcast_object_list(told, group=self.group, group_src=source)
        own = iter(tensors)
        found: Any = tree_map_only(_Sent, lambda sent: self._broadcast(sent, next(own, None), source), told[0])
        return found

    def _broadcast(self, sent: _Sent, own: Tensor | None, source: int) -> Tensor:
        local = filled(sent.local, self._context.device, 0) if own is None else local_tensor(own).contiguous()
        dist.broadcast(local, group=self.group, group_src=source)
        if own is not None:
            return own
        if sent.placed is None:
            return local
        placements, shape, stride = sent.placed  # parts may be of other sizes: those of one do not say that of all
        return DTensor.from_local(local, self._context.tp, placements, run_check=False, shape=shape, stride=stride)


class _Sent:
    """A tensor that is sent: its form, and how it lies on ``tp``, with its shape and stride, if it is split there."""

    def __init__(self, tensor: Tensor) -> None:
        self.local = form_of(local_tensor(tensor))
        self.placed: tuple[Any, torch.Size, tuple[int, ...]] | None = None
        if isinstance(tensor, DTensor):
            self.placed = tensor.placements, tensor.shape, tensor.stride()
