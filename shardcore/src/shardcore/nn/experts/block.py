"""The block of a mixture of experts: where activations enter and leave its experts.

Router, experts and shared experts are one region. Everything in it is computed from activations that are the same on
all ranks; each rank multiplies with its slice of every expert, so that what the block returns is a summand, and the
gradient of whatever is in between is one too: of the input, of the router's weight, of the weights of tokens. The block
sums its output once, in the forward, and the gradient of its input once, in the backward.

The router's logits are computed by every rank in full, and leave the block for a balancing loss that every rank
computes in full: that gradient is divided by the number of ranks before it joins the summands.

Where experts are modules of their own, one that gets no token is not called and has no gradient. FSDP2 reduces the
gradients that a rank has, so replicas with gradients of different experts would wait for each other, or add up those of
different ones. So replicas tell each other which experts they have called: who has not called one that another replica
has gives it a gradient of zero. An expert that nobody has called stays without one, and optimizers skip it, as they do
unsharded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardcore.comm.collectives import packed
from shardcore.comm.experts import share_gradient, touch_elsewhere
from shardcore.mesh.context import ShardContext
from shardcore.nn.arguments import Argument
from shardcore.nn.base import ParallelMixin
from shardcore.nn.sequence.shard import enter_region, leave_region


class ExpertsBlock(ParallelMixin):
    """A module that routes tokens to experts, of which each rank has slices.

    Its ``argument`` is (B, S, H), the same on all ranks, or this rank's tokens of it, (B, S/tp, H); output likewise,
    summed over the ranks. If the native forward returns a tuple, its first element is that output and the others are
    the same on all ranks (the router's logits).
    """

    keeps_name: ClassVar[bool] = True
    kept_options: ClassVar[Mapping[str, str]] = {"argument": "_experts_argument"}

    _experts_argument: Argument
    _shard_context: ShardContext

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the native forward on all tokens, and sum what it returns."""
        args, kwargs = self._experts_argument.changed(args, kwargs, self._enter)
        out = super().forward(*args, **kwargs)
        if not isinstance(out, tuple):
            return self._leave(out)
        others = (share_gradient(o, self._shard_context.size) if isinstance(o, Tensor) else o for o in out[1:])
        return (self._leave(out[0]), *others)

    def _enter(self, x: Tensor) -> Tensor:
        x = enter_region(x, self._shard_context.channel, self._shard_sequence, type(self).__name__)
        # Blocks view their tokens as (B * S, H), and cutting the padding off leaves gaps.
        return packed(x)

    def _leave(self, out: Tensor) -> Tensor:
        if (tokens := self._shard_sequence) is not None and tokens.last is not None and out.ndim == 2:
            out = out.unflatten(0, (-1, tokens.last))  # a block may return its tokens as it multiplied them, (B * S, H)
        return leave_region(out, self._shard_context.channel, self._shard_sequence, type(self).__name__)


class RouterLogits(ParallelMixin):
    """A router whose logits the model captures for a loss, besides what its block uses.

    ``captured`` is their place in the tuple that it returns; where that is one tensor, the block hands it out.
    """

    keeps_name: ClassVar[bool] = True
    kept_options: ClassVar[Mapping[str, str]] = {"captured": "_router_captured"}

    _router_captured: int = 0
    _shard_context: ShardContext

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the native forward, and let the captured logits carry a whole gradient."""
        out = super().forward(*args, **kwargs)
        if not isinstance(out, tuple):
            return out
        place, ranks = self._router_captured, self._shard_context.size
        return (*out[:place], share_gradient(out[place], ranks), *out[place + 1 :])


_CALLED = "_expert_called"


class ListedExperts(ParallelMixin):
    """A module that calls some experts of a list, at ``weights`` below it; its output, or the first, is their sum."""

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
        for group in self._shard_context.replica_groups:
            dist.all_reduce(called, op=dist.ReduceOp.MAX, group=group)
        lacking = [[] if expert.__dict__[_CALLED] else list(expert.parameters()) for expert in experts]
        return touch_elsewhere(out, called, lacking)


class ListedExpert(ParallelMixin):
    """One expert of a list, which writes down that it was called."""

    keeps_name: ClassVar[bool] = True
    plan_needs_tp: ClassVar[bool] = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the native forward."""
        self.__dict__[_CALLED] = True
        return super().forward(*args, **kwargs)
