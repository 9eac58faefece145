"""Experts that are modules of their own, on replicas whose tokens visit different ones.

An expert that gets no token is not called and has no gradient. FSDP2 reduces the gradients that a rank has, so replicas
with gradients of different experts would wait for each other, or add up those of different ones. Here replicas tell
each other which experts they have called: who has not called one that another replica has gives it a gradient of zero.
An expert that nobody has called stays without one, so that optimizers skip it, as they do unsharded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardcore.comm.experts import touch_elsewhere
from shardcore.mesh import ShardContext
from shardcore.nn.base import ParallelMixin

__all__ = ["ListedExpert", "ListedExperts"]

_CALLED = "_expert_called"


class ListedExperts(ParallelMixin):
    """A module that calls some modules of a list of experts, and whose output, or the first of a tuple, is their sum.

    Options:
        weights: the path of the list below the module.
    """

    keeps_name: ClassVar[bool] = True
    plan_needs_tp: ClassVar[bool] = False
    kept_options: ClassVar[Mapping[str, str]] = {"weights": "_experts_list"}

    _experts_list: str = ""
    _shard_context: ShardContext

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the native forward, and see to the gradients of experts that only other replicas have called."""
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        experts = list(self.get_submodule(self._experts_list).children())
        for expert in experts:
            expert.__dict__[_CALLED] = False
        out = super().forward(*args, **kwargs)
        if isinstance(out, tuple):
            return (self._with_all(out[0], experts), *out[1:])
        return self._with_all(out, experts)

    def _with_all(self, out: Tensor, experts: list[nn.Module]) -> Tensor:
        called = torch.tensor([expert.__dict__[_CALLED] for expert in experts], dtype=torch.int32, device=out.device)
        missed = [not expert.__dict__[_CALLED] for expert in experts]
        for group in self._groups:
            dist.all_reduce(called, op=dist.ReduceOp.MAX, group=group)
        lacking = [list(expert.parameters()) if miss else [] for expert, miss in zip(experts, missed, strict=True)]
        return touch_elsewhere(out, called, lacking)

    @property
    def _groups(self) -> list[ProcessGroup]:
        return self._shard_context.replica_groups


class ListedExpert(ParallelMixin):
    """One expert of a list, which writes down that it was called."""

    keeps_name: ClassVar[bool] = True
    plan_needs_tp: ClassVar[bool] = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the native forward."""
        self.__dict__[_CALLED] = True
        return super().forward(*args, **kwargs)
