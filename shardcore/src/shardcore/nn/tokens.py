"""Sequence parallelism of one stack of blocks: where tokens are split over the ranks, and where they are whole again.

Between the input of its first block and the output of its last module a stack holds some of the tokens on each rank;
regions gather them at their entry and scatter them at their exit (`shardcore.comm.sequence`). After Korthikanti et al.
2022, https://arxiv.org/abs/2205.05198. How many tokens the running call has is said once, where they are split, and
whatever depends on it asks the same `TokenSplit`: regions, row linears, and the norms between them. Each block carries
the number into its own forward as an argument, so that whoever recomputes the block later, while another call may have
come between, recomputes it for the same number (hazard H38).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from shardcore.comm.sequence import (
    gather_sequence,
    leave_in_place,
    local_tokens,
    own_tokens,
    scatter_sequence,
)
from shardcore.errors import NotSupportedError, ShardcoreError
from shardcore.mesh import ShardContext
from shardcore.nn.base import SwappedModule
from shardcore.nn.dropout import DropoutSites

__all__ = ["TokenBlock", "TokenEnd", "TokenModule", "TokenSplit", "TokenStack", "with_first"]

# Carries the number of tokens from a block's call into its forward, through whatever recomputes it.
_CARRIED = "_shardcore_tokens"


class _State(NamedTuple):
    """What the forward of a stack is in."""

    #: Outside of any forward, in the one that calls the stack's, before the first block, among the blocks, after them.
    phase: Literal["outside", "ahead", "before", "inside", "after"] = "outside"
    places: bool = False
    length: int | None = None
    last: int | None = None
    placed: int | None = None
    gathered: bool = False
    taken: weakref.ref[Tensor] | None = None


class TokenSplit:
    """How the tokens of one stack of blocks are split, for the call that is running.

    Between a split embedding and the first block a tensor has its whole shape, which masks are made from, while only
    the tokens that this rank keeps count in it: it is *placed*.

    Attributes:
        length: the tokens of the call; None where they are whole: outside the stack, and in calls too short to split.
        last: what ``length`` was in the last forward of the stack.
        placed: the tokens of the call, as long as they are placed.
    """

    def __init__(self, context: ShardContext) -> None:
        self.context = context
        self._set(_State())

    def _set(self, state: _State) -> None:
        self.phase, self._places, self.length, self.last, self.placed, self._gathered, self._taken = state

    def _state(self) -> _State:
        return _State(self.phase, self._places, self.length, self.last, self.placed, self._gathered, self._taken)

    @property
    def local(self) -> int | None:
        """The tokens on this rank, padding included; None while they are whole."""
        return None if self.length is None else local_tokens(self.length, self.context.size)

    @property
    def running(self) -> bool:
        """Whether the forward of the stack is running."""
        return self.phase not in ("outside", "ahead")

    def open(self, *, places: bool) -> _State:
        """Begin a forward that calls the stack's, in which the embedding may place; return what `stop` is given."""
        outer = self._state()
        self._set(_State("ahead", places))
        return outer

    def start(self) -> _State:
        """Begin a forward of the stack, and return what `stop` is given."""
        outer = self._state()
        self._set(outer._replace(phase="before") if outer.phase == "ahead" else _State("before"))
        return outer

    def stop(self, outer: _State) -> None:
        """End the forward of the stack, or of what calls it; one that it was called in goes on."""
        if outer.phase in ("outside", "ahead"):
            # What was captured is looked at after the end.
            outer = _State(outer.phase, last=self.last, taken=self._taken)
        self._set(outer)

    def place(self, summand: Tensor) -> Tensor | None:
        """Return the sum over the ranks of what the embedding has, placed; None where the sum has to be whole."""
        if not self._places or self.placed is not None or torch.compiler.is_compiling() or not self._splits(summand):
            return None
        self.placed = summand.size(1)
        return leave_in_place(summand, self.context.group)

    def take(self, x: Tensor) -> Tensor:
        """Return the tokens that this rank keeps of ``x`` (B, S, ...)."""
        if self.placed is not None and x.size(1) != self.placed:
            raise NotSupportedError(
                f"the embedding of a stack has looked up {self.placed} tokens for each sequence, and its first block "
                f"is called with {x.size(1)}: under sequence parallelism each rank has the sums of its own tokens "
                "only. Remove embedding= from the policy's sequence row."
            )
        # Whoever takes them first gathers the gradient, for what was added to the embedding; others are given theirs.
        take = own_tokens if self._gathered else scatter_sequence
        self._gathered = self.placed is not None
        return take(x, self.context.group)

    def begin(self, x: Tensor) -> Tensor:
        """Split the tokens of ``x`` (B, S, ...), which the first block is called with, if each rank gets one."""
        own = self.take(x) if self.placed is not None or self._splits(x) else x
        if self.placed is not None:
            self._taken = weakref.ref(x)
        self.last = self.length = x.size(1) if own is not x else None
        self.phase, self._places, self.placed, self._gathered = "inside", False, None, False
        return own

    def end(self, x: Tensor) -> Tensor:
        """Return the tokens of all ranks, (B, S, ...)."""
        length, self.length, self.phase = self.length, None, "after"
        return x if length is None else gather_sequence(x, self.context.group, length)

    def whole(self, captured: Tensor) -> Tensor:
        """Return the tokens of all ranks of what was captured in the last forward, (B, S, ...)."""
        if self.last is None:
            return captured
        if captured.size(1) == self.last:
            if self._taken is None or self._taken() is not captured:
                return captured  # from before the split, or after the end
            captured = scatter_sequence(captured, self.context.group)
        return gather_sequence(captured, self.context.group, self.last)

    def _splits(self, x: Tensor) -> bool:
        return x.ndim >= 3 and x.size(1) >= self.context.size

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


class TokenModule(SwappedModule):
    """What acts on a `TokenSplit`.

    Options:
        tokens: the `TokenSplit`.
    """

    keeps_name: ClassVar[bool] = True

    _tokens: TokenSplit

    @classmethod
    def adopt(cls, module: nn.Module, context: ShardContext, **options: Any) -> Self:
        """See `SwappedModule.adopt`."""
        new = super().adopt(module, context)
        new.__dict__["_tokens"] = options["tokens"]
        return new


class TokenStack(TokenModule):
    """The module whose forward runs the blocks: tokens are split only inside it.

    Options:
        tokens: the `TokenSplit`.
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
            if tokens.length is not None or tokens.placed is not None:
                raise ShardcoreError(
                    f"{type(self).__name__} returned while its tokens were split: the module that its policy gathers "
                    "them at was not called. Correct gather= in the policy, or turn sequence parallelism off."
                )
            return out
        finally:
            tokens.stop(outer)


class TokenBlock(TokenModule):
    """A block of a stack. The first one that is called splits the tokens; inside, each rank draws its own numbers.

    Options:
        argument: name and position of the argument with the tokens.
        tokens: the `TokenSplit`.
    """

    _tokens_argument: tuple[str, int]
    _tokens_dropouts: DropoutSites

    @classmethod
    def adopt(cls, module: nn.Module, context: ShardContext, **options: Any) -> Self:
        """See `SwappedModule.adopt`."""
        dropouts = DropoutSites([module])
        new = super().adopt(module, context, **options)
        new.__dict__["_tokens_argument"] = options["argument"]
        new.__dict__["_tokens_dropouts"] = dropouts
        return new

    # Not a hook and not the forward: checkpoints and FSDP2 are inside this call, so that neither repeats the split.
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Split the tokens if no block of the stack has yet, and run the block for their number."""
        tokens = self._tokens
        if tokens.running:
            if tokens.phase != "inside":
                args, kwargs = self._with_argument(tokens.begin(self._argument(args, kwargs)), args, kwargs)
            length = tokens.length
        elif not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
            # Recomputed by a checkpoint that somebody put around the call.
            args, kwargs = self._again(args, kwargs)
            length = tokens.last
        else:
            length = None  # called by itself: its tokens are whole
        if length is not None:
            kwargs = {**kwargs, _CARRIED: length}
        return super().__call__(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the native forward for the number of tokens that the call of the block carries."""
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
        if self._tokens.length is None or not self._tokens_dropouts.live():
            return super().forward(*args, **kwargs)
        _fork(self)
        try:
            return super().forward(*args, **kwargs)
        finally:
            _join(self)

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
            return self._with_argument(scatter_sequence(x, tokens.context.group), args, kwargs)
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


def with_first(
    function: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with ``function`` applied to the first of them."""
    if args:
        return (function(args[0]), *args[1:]), kwargs
    first = next(iter(kwargs))
    return args, {**kwargs, first: function(kwargs[first])}


class TokenEnd(TokenModule):
    """The last module of a stack: its output is whole again.

    Options:
        tokens: the `TokenSplit`.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module and gather its output, if tokens are split."""
        tokens = self._tokens
        if tokens.phase == "before" and tokens.placed is not None and not isinstance(self, TokenBlock):
            # No block was called (LayerDrop).
            args, kwargs = with_first(tokens.begin, args, kwargs)
        out = super().__call__(*args, **kwargs)
        if tokens.phase != "inside":
            return out
        if isinstance(out, Tensor):
            return tokens.end(out)
        if isinstance(out, tuple):  # blocks of transformers 4 return their outputs so, hidden states first
            return (tokens.end(out[0]), *out[1:])
        raise NotSupportedError(
            f"{type(self).__name__} returns a {type(out).__name__}, of which sequence parallelism does not know the "
            "hidden states; wanted a tensor, or a tuple that begins with it"
        )


# Generator states cannot be traced: these two are graph breaks, and only where a dropout is live.
@torch.compiler.disable  # type: ignore[untyped-decorator]  # untyped in torch
def _fork(block: TokenBlock) -> None:
    block._tokens.context.random.fork(id(block))


@torch.compiler.disable  # type: ignore[untyped-decorator]  # untyped in torch
def _join(block: TokenBlock) -> None:
    block._tokens.context.random.join(id(block))
