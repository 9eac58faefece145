"""What the last stage returns, on every rank of the pipeline."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from shardcore.comm.dtensor_params import local_tensor
from shardcore.mesh import ShardContext
from shardcore.pipeline.ranks import Ranks
from shardcore.pipeline.script import Script, Value

__all__ = ["Outputs"]


class Outputs:
    """Outputs of the last stage, which its rank sends to all ranks of the pipeline.

    Args:
        ranks: those of the pipeline.
        source: the position of the one that has the last stage.
        context: that of the model.
    """

    def __init__(self, ranks: Ranks, source: int, context: ShardContext) -> None:
        self._ranks, self._source, self._context = ranks, source, context

    def shared(self, out: Any, script: Script) -> Any:
        """Return the output of the model on every rank; what earlier stages have computed of it is None.

        Args:
            out: the output, on the rank that has the last stage.
            script: of the call.
        """
        described: list[Any] = [None]
        tensors: list[Tensor] = []
        if self._ranks.rank == self._source:
            leaves, tree = tree_flatten(out)
            leaves = [None if place in script.missing else leaf for place, leaf in enumerate(leaves)]
            out = tree_unflatten(leaves, tree)
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            described = [tree_map_only(Tensor, _Sent.of, out)]
        dist.broadcast_object_list(
            described, group=self._ranks.group, group_src=self._source, device=torch.device("cpu")
        )
        arrived = iter(tensors)
        found: Any = tree_map_only(_Sent, lambda sent: self._received(sent, next(arrived, None)), described[0])
        return found

    def _received(self, sent: _Sent, own: Tensor | None) -> Tensor:
        local = sent.value.stand_in(self._context.device, 0) if own is None else local_tensor(own).contiguous()
        dist.broadcast(local, group=self._ranks.group, group_src=self._source)
        if own is not None:
            return own
        if sent.placed is None:
            return local
        placements, shape, stride = sent.placed  # parts may be of other sizes: those of one do not say that of all
        return DTensor.from_local(local, self._context.tp, placements, run_check=False, shape=shape, stride=stride)


class _Sent:
    """A tensor that is sent: its form, and how it lies on ``tp``, with its shape and stride, if it is split there."""

    def __init__(self, value: Value, placed: tuple[Any, torch.Size, tuple[int, ...]] | None) -> None:
        self.value, self.placed = value, placed

    @classmethod
    def of(cls, tensor: Tensor) -> _Sent:
        placed = (tensor.placements, tensor.shape, tensor.stride()) if isinstance(tensor, DTensor) else None
        return cls(Value.of(local_tensor(tensor)), placed)
