"""How the tokens of one stack of blocks are split over the ranks, for the call that is running.

Between the input of the first block and the output of the last module of a stack, each rank has a part of the tokens;
regions gather them at their entry and scatter the sum at their exit (`shardcore.comm.sequence`). After Korthikanti et
al. 2022, https://arxiv.org/abs/2205.05198. The number of tokens of the running call is set once, where they are split
(`shardcore.nn.sequence.tokens`); regions, row linears, and the norms between them read it from one `SequenceShard`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from shardcore.comm.collectives import Channel, copy_to_tp, reduce_from_tp
from shardcore.comm.sequence import (
    enter_from_sequence,
    gather_sequence,
    leave_to_sequence,
    local_tokens,
    scatter_sequence,
)
from shardcore.errors import NotSupportedError
from shardcore.mesh.context import ShardContext

#: Outside of the forward of a stack, before the first block, among the blocks, after them.
_Phase = Literal["outside", "before", "inside", "after"]


class SequenceShard:
    """How the tokens of one stack of blocks are split, for the call that is running.

    There is one for each stack, for as long as the model lives. The stack's forward starts and stops it, its first
    block sets ``length`` (`scatter`), its last module resets it (`gather`), and a block that is recomputed sets it for
    its own forward. Regions, row linears and norms of the stack read it; ``last`` stays after the call, for the outputs
    that the model has captured.

    Attributes:
        length: the tokens of the call; None where they are not split: outside the stack, and in calls with fewer tokens
            than ranks.
        last: the ``length`` of the last forward of the stack.
    """

    def __init__(self, context: ShardContext) -> None:
        self.context = context
        self.phase: _Phase = "outside"
        self.length: int | None = None
        self.last: int | None = None

    @property
    def local(self) -> int | None:
        """The number of tokens on this rank, padding included; None while they are not split."""
        return None if self.length is None else local_tokens(self.length, self.context.size)

    def start(self) -> tuple[_Phase, int | None, int | None]:
        """Begin a forward of the stack, and return the state before it, for `stop`."""
        outer = self.phase, self.length, self.last
        self.phase, self.length, self.last = "before", None, None
        return outer

    def stop(self, outer: tuple[_Phase, int | None, int | None]) -> None:
        """End the forward of the stack; ``outer``, a forward of it that is still running, goes on."""
        if outer[0] == "outside":
            outer = "outside", None, self.last  # what was captured is looked at after the end
        self.phase, self.length, self.last = outer

    def scatter(self, x: Tensor) -> Tensor:
        """Return this rank's tokens of ``x`` (B, S, ...), the input of the first block; all if they are too few."""
        splits = x.ndim >= 3 and x.size(1) >= self.context.size
        self.phase, self.last = "inside", x.size(1) if splits else None
        self.length = self.last
        return scatter_sequence(x, self.context.channel) if splits else x

    def gather(self, x: Tensor) -> Tensor:
        """Return the tokens of all ranks, (B, S, ...), at the end of the stack."""
        length, self.length, self.phase = self.length, None, "after"
        return x if length is None else gather_sequence(x, self.context.channel.exact, length)

    def gather_captured(self, captured: Tensor) -> Tensor:
        """Return the tokens of all ranks, (B, S, ...), of an output captured in the last forward."""
        if self.last is None or captured.size(1) != local_tokens(self.last, self.context.size):
            return captured  # from before the split, or after the end
        return gather_sequence(captured, self.context.channel.exact, self.last)

    def expect(self, x: Tensor, tokens: int | None, where: str) -> None:
        """Raise `NotSupportedError` for a tensor that holds another number of tokens than ``tokens``."""
        if x.ndim < 3 or x.size(1) != tokens:
            raise NotSupportedError(
                f"{where} got a tensor {tuple(x.shape)} under sequence parallelism, where {tokens} of {self.last} "
                "tokens were expected in its second dim; a block that works on a part of its tokens at a time "
                "(chunk_size_feed_forward) cannot be split along the sequence: turn that, or sequence parallelism, off"
            )


def enter_region(x: Tensor, channel: Channel, tokens: SequenceShard | None, where: str) -> Tensor:
    """Enter a region: (B, S, ...), the same on all ranks, or this rank's tokens (B, L, ...) of it, to (B, S, ...).

    Forward: the identity, or an all-gather; backward: an all-reduce, or a reduce-scatter. ``tokens`` is how the
    activations outside are split along the sequence, None if they never are; ``where`` is what enters, for an error.
    """
    if tokens is None or tokens.length is None:
        return copy_to_tp(x, channel) if torch.is_grad_enabled() else x
    tokens.expect(x, tokens.local, where)
    return enter_from_sequence(x, channel, tokens.length)


def leave_region(
    out: Tensor, channel: Channel, tokens: SequenceShard | None, where: str, *, fresh: bool = False
) -> Tensor:
    """Leave a region with this rank's summand (B, S, ...): the sum, or this rank's tokens (B, L, ...) of it.

    Forward: an all-reduce, or a reduce-scatter; backward: the identity, or an all-gather. ``fresh`` as `reduce_from_tp`
    has it, the others as `enter_region`.
    """
    if tokens is None or tokens.length is None:
        return reduce_from_tp(out, channel, fresh=fresh)
    tokens.expect(out, tokens.length, where)
    return leave_to_sequence(out, channel)
