"""The block of a mixture of experts: where activations enter and leave its experts.

Router, experts and shared experts are one region. Everything in it is computed from activations that are the same on
all ranks; each rank multiplies with its slice of every expert, so that what the block returns is a summand, and the
gradient of whatever is in between is one too: of the input, of the router's weight, of the weights of tokens. The block
sums its output once, in the forward, and the gradient of its input once, in the backward.

The router's logits are computed by every rank in full, and leave the block for a balancing loss that every rank
computes in full: that gradient is divided by the number of ranks before it joins the summands.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from torch import Tensor, nn
from typing_extensions import override

from shardcore.comm.collectives import packed
from shardcore.comm.experts import share_gradient
from shardcore.mesh import ShardContext
from shardcore.nn.arguments import Argument
from shardcore.nn.base import ParallelMixin
from shardcore.nn.sequence.shard import SequenceShard, enter_region, leave_region

__all__ = ["ExpertsBlock", "RouterLogits"]


class ExpertsBlock(ParallelMixin):
    """A module that routes tokens to experts, of which each rank has slices.

    Input (B, S, H), the same on all ranks, or this rank's tokens of it, (B, S/tp, H); output likewise, summed over the
    ranks. If the native forward returns a tuple, its first element is that output and the others are the same on all
    ranks (the router's logits).

    Options:
        argument: name and position of the argument that is the input.
    """

    keeps_name: ClassVar[bool] = True
    option_names: ClassVar[frozenset[str]] = frozenset({"argument"})

    #: Set where the activations outside are split along the sequence.
    _experts_sequence: SequenceShard | None
    _experts_argument: Argument
    _shard_context: ShardContext

    @override
    def _take_sequence(self, tokens: SequenceShard | None) -> None:
        self.__dict__["_experts_sequence"] = tokens

    @classmethod
    @override
    def swap_class(
        cls, module: nn.Module, context: ShardContext, *, argument: tuple[str, int] = ("", 0), **options: Any
    ) -> Self:
        new = super().swap_class(module, context)
        new.__dict__.update(_experts_sequence=None, _experts_argument=Argument(*argument))
        return new

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the native forward on all tokens, and sum what it returns."""
        args, kwargs = self._experts_argument.changed(args, kwargs, self._enter)
        out = super().forward(*args, **kwargs)
        if not isinstance(out, tuple):
            return self._leave(out)
        ranks = self._shard_context.size
        others = (share_gradient(o, ranks) if isinstance(o, Tensor) else o for o in out[1:])
        return (self._leave(out[0]), *others)

    def _enter(self, x: Tensor) -> Tensor:
        x = enter_region(x, self._shard_context.channel, self._experts_sequence, type(self).__name__)
        # Blocks view their tokens as (B * S, H), and cutting the padding off leaves gaps.
        return packed(x)

    def _leave(self, out: Tensor) -> Tensor:
        return leave_region(out, self._shard_context.channel, self._experts_sequence, type(self).__name__)


class RouterLogits(ParallelMixin):
    """A router whose logits the model captures for a loss, besides what its block uses.

    Options:
        captured: their place in the tuple that the router returns. Where it returns one tensor, its block hands it out.
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
