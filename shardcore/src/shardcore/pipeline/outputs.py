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
        if sent.placements is None:
            return local
        return DTensor.from_local(local, self._context.tp, sent.placements, run_check=False)


class _Sent:
    """A tensor that is sent: its form, and how it lies on ``tp`` if it is split there."""

    def __init__(self, value: Value, placements: Any) -> None:
        self.value, self.placements = value, placements

    @classmethod
    def of(cls, tensor: Tensor) -> _Sent:
        return cls(Value.of(local_tensor(tensor)), tensor.placements if isinstance(tensor, DTensor) else None)
