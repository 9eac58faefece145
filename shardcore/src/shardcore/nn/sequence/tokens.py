"""Sequence parallelism of one stack of blocks: where tokens are split over the ranks, and where they are gathered.

Between the input of the first block and the output of the last module of a stack, each rank has a part of the tokens;
regions gather them at their entry and scatter the sum at their exit (`shardcore.comm.sequence`). After Korthikanti et
al. 2022, https://arxiv.org/abs/2205.05198. The number of tokens of the running call is set once, where they are split;
regions, row linears, and the norms between them read it from the same `SequenceShard`. Each block passes the number to
its own forward as an argument, so that a checkpoint which recomputes the block later, perhaps after another call,
recomputes it for the same number.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from shardcore._torch import backward_task
from shardcore.comm.sequence import gather_sequence, local_tokens, scatter_sequence
from shardcore.errors import NotSupportedError, ShardcoreError
from shardcore.mesh import ShardContext
from shardcore.nn.base import SwappedModule
from shardcore.nn.randomness.dropout import DropoutSites

__all__ = ["SequenceBlock", "SequenceEnd", "SequenceModule", "SequenceShard", "SequenceStack"]

# Carries the number of tokens from a block's call into its forward, through whatever recomputes it.
_CARRIED = "_shardcore_tokens"


class _State(NamedTuple):
    """The state of a `SequenceShard`."""

    #: Outside of its forward, before the first block, among the blocks, after them.
    phase: Literal["outside", "before", "inside", "after"] = "outside"
    length: int | None = None
    last: int | None = None


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
        self._set(_State())

    def _set(self, state: _State) -> None:
        self.phase, self.length, self.last = state

    def _state(self) -> _State:
        return _State(self.phase, self.length, self.last)

    @property
    def local(self) -> int | None:
        """The number of tokens on this rank, padding included; None while they are not split."""
        return None if self.length is None else local_tokens(self.length, self.context.size)

    @property
    def running(self) -> bool:
        """Whether the forward of the stack is running."""
        return self.phase != "outside"

    def start(self) -> _State:
        """Begin a forward of the stack, and return the state before it, for `stop`."""
        outer = self._state()
        self._set(_State("before"))
        return outer

    def stop(self, outer: _State) -> None:
        """End the forward of the stack; ``outer``, a forward of it that is still running, goes on."""
        # What was captured is looked at after the end.
        self._set(_State(last=self.last) if outer.phase == "outside" else outer)

    def scatter(self, x: Tensor) -> Tensor:
        """Return this rank's tokens of ``x`` (B, S, ...), the input of the first block; all if they are too few."""
        splits = x.ndim >= 3 and x.size(1) >= self.context.size
        self.phase, self.last = "inside", x.size(1) if splits else None
        self.length = self.last
        return scatter_sequence(x, self.context.channel) if splits else x

    def gather(self, x: Tensor) -> Tensor:
        """Return the tokens of all ranks, (B, S, ...), at the end of the stack."""
        length, self.length, self.phase = self.length, None, "after"
        return x if length is None else gather_sequence(x, self.context.channel, length)

    def gather_captured(self, captured: Tensor) -> Tensor:
        """Return the tokens of all ranks, (B, S, ...), of an output captured in the last forward."""
        if self.last is None:
            return captured
        if captured.size(1) == self.last:
            return captured  # from before the split, or after the end
        return gather_sequence(captured, self.context.channel, self.last)

    def expect(self, x: Tensor, tokens: int | None, where: str) -> None:
        """Refuse a tensor that holds another number of tokens than it should.

        Raises:
            NotSupportedError: it does.
        """
        if x.ndim < 3 or x.size(1) != tokens:
            raise NotSupportedError(
                f"{where} got a tensor {tuple(x.shape)} under sequence parallelism, where {tokens} of {self.last} "
                "tokens were expected in its second dim; a block that works on a part of its tokens at a time "
                "(chunk_size_feed_forward) cannot be split along the sequence: turn that, or sequence parallelism, off"
            )


class SequenceModule(SwappedModule):
    """A module that changes a `SequenceShard`.

    Options:
        tokens: the `SequenceShard`.
    """

    keeps_name: ClassVar[bool] = True

    _tokens: SequenceShard

    @classmethod
    @override
    def swap_class(cls, module: nn.Module, context: ShardContext, **options: Any) -> Self:
        new = super().swap_class(module, context)
        new.__dict__["_tokens"] = options["tokens"]
        return new


class SequenceStack(SequenceModule):
    """The module whose forward runs the blocks: only while it runs are tokens split.

    Options:
        tokens: the `SequenceShard`.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the native forward.

        Raises:
            ShardcoreError: it returned while tokens were still split.
        """
        tokens = self._tokens
        outer = tokens.start()
        try:
            out = super().forward(*args, **kwargs)
            if tokens.length is not None:
                raise ShardcoreError(
                    f"{type(self).__name__} returned while its tokens were split: the module that its policy gathers "
                    "them at was not called. Correct gather= in the policy, or turn sequence parallelism off."
                )
            return out
        finally:
            tokens.stop(outer)


class SequenceBlock(SequenceModule):
    """A block of a stack. The first one that is called splits the tokens; inside, ranks draw different numbers.

    Options:
        argument: name and position of the argument with the tokens.
        tokens: the `SequenceShard`.
    """

    _tokens_argument: tuple[str, int]
    _tokens_dropouts: DropoutSites

    @classmethod
    @override
    def swap_class(cls, module: nn.Module, context: ShardContext, **options: Any) -> Self:
        dropouts = DropoutSites([module])
        new = super().swap_class(module, context, **options)
        new.__dict__["_tokens_argument"] = options["argument"]
        new.__dict__["_tokens_dropouts"] = dropouts
        return new

    # Not a hook and not the forward: checkpoints and FSDP2 are inside this call, so that neither repeats the split.
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Split the tokens if this is the first block that is called, and run the block for their number."""
        tokens = self._tokens
        if tokens.running:
            if tokens.phase != "inside":
                args, kwargs = self._with_argument(tokens.scatter(self._argument(args, kwargs)), args, kwargs)
            length = tokens.length
        elif not torch.compiler.is_compiling() and backward_task() != -1:
            # RecomputedBlock by a checkpoint that somebody put around the call.
            args, kwargs = self._again(args, kwargs)
            length = tokens.last
        else:
            length = None  # called by itself: its tokens are whole
        if length is not None:
            kwargs = {**kwargs, _CARRIED: length}
        return super().__call__(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the native forward for the number of tokens that `__call__` has passed."""
        tokens, length = self._tokens, kwargs.pop(_CARRIED, None)
        before = tokens.length
        if before == length:  # always, but for recomputation; what a checkpoint runs may change nothing when compiled
            return self._run(*args, **kwargs)
        tokens.length = length
        try:
            return self._run(*args, **kwargs)
        finally:
            tokens.length = before

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self._tokens.length is None or not (self._is_random() or self._tokens_dropouts.live()):
            return super().forward(*args, **kwargs)
        _fork(self)
        try:
            return super().forward(*args, **kwargs)
        finally:
            _join(self)

    def _is_random(self) -> bool:
        # In eager mode whatever draws numbers inside need not be known.
        return not torch.compiler.is_compiling() and self._tokens.context.random.in_use

    def _again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tokens, x = self._tokens, self._argument(args, kwargs)
        if tokens.last is None:
            return args, kwargs
        if x.is_leaf and x.requires_grad:
            raise NotSupportedError(
                f"a reentrant checkpoint around a {type(self).__name__} under sequence parallelism: it cannot tell for "
                "how many tokens it recomputes. Say use_reentrant=False, or model.gradient_checkpointing_enable()."
            )
        if x.size(1) == tokens.last:
            return self._with_argument(scatter_sequence(x, tokens.context.channel), args, kwargs)
        tokens.expect(x, local_tokens(tokens.last, tokens.context.size), type(self).__name__)
        return args, kwargs

    def _argument(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        name, place = self._tokens_argument
        x: Tensor = kwargs[name] if name in kwargs else args[place]
        return x

    def _with_argument(
        self, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        name, place = self._tokens_argument
        if name in kwargs:
            return args, {**kwargs, name: x}
        return (*args[:place], x, *args[place + 1 :]), kwargs


class SequenceEnd(SequenceModule):
    """The last module of a stack: its output is gathered.

    Options:
        tokens: the `SequenceShard`.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module and gather its output, if tokens are split."""
        tokens = self._tokens
        out = super().__call__(*args, **kwargs)
        if tokens.phase != "inside":
            return out
        if isinstance(out, Tensor):
            return tokens.gather(out)
        if isinstance(out, tuple):  # as blocks of some libraries return their outputs, hidden states first
            return (tokens.gather(out[0]), *out[1:])
        raise NotSupportedError(
            f"{type(self).__name__} returns a {type(out).__name__}, of which sequence parallelism does not know the "
            "hidden states; wanted a tensor, or a tuple that begins with it"
        )


# Generator states cannot be traced: these two are graph breaks, and only where a dropout is live.
@torch.compiler.disable  # type: ignore[untyped-decorator]  # untyped in torch
def _fork(block: SequenceBlock) -> None:
    block._tokens.context.random.fork(id(block))


@torch.compiler.disable  # type: ignore[untyped-decorator]  # untyped in torch
def _join(block: SequenceBlock) -> None:
    block._tokens.context.random.join(id(block))
