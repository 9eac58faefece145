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
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from shardcore.comm.sequence import gather_sequence, leave_to_sequence, local_tokens, scatter_sequence
from shardcore.errors import NotSupportedError, ShardcoreError
from shardcore.mesh import ShardContext
from shardcore.nn.base import SwappedModule
from shardcore.nn.dropout import DropoutSites

__all__ = ["TokenBlock", "TokenEnd", "TokenSplit", "TokenStack"]

# Carries the number of tokens from a block's call into its forward, through whatever recomputes it.
_CARRIED = "_shardcore_tokens"
_SUMMAND = "_shardcore_summand"  # on a tensor of which this rank has a summand, also when it is used again


class _State(NamedTuple):
    """What a forward of the stack goes on with, when another one that it calls has ended."""

    open: bool
    length: int | None
    last: int | None
    summand: tuple[weakref.ref[Tensor], int] | None


class TokenSplit:
    """How the tokens of one stack of blocks are split, for the call that is running.

    Attributes:
        length: the tokens of the call; None where they are whole: outside the stack, and in calls too short to split.
        last: what ``length`` was in the last forward of the stack.
    """

    def __init__(self, context: ShardContext) -> None:
        self.context = context
        self.length: int | None = None
        self.last: int | None = None
        self.running = False  # the forward of the stack
        self.open = False  # its first block was called, its last module was not
        self._summand: tuple[weakref.ref[Tensor], int] | None = None  # and its version
        self._summed = False  # the last first block was called with a summand

    @property
    def local(self) -> int | None:
        """The tokens on this rank, padding included; None while they are whole."""
        return None if self.length is None else local_tokens(self.length, self.context.size)

    def start(self) -> _State | None:
        """Begin a forward of the stack, and return the state of the one that is running, if it calls this one."""
        state = _State(self.open, self.length, self.last, self._summand) if self.running else None
        self.running, self.open, self.length, self.last, self._summand = True, False, None, None, None
        return state

    def stop(self, outer: _State | None) -> None:
        """End the forward of the stack."""
        self.running = outer is not None
        if outer is None:
            self.open, self.length, self._summand = False, None, None
        else:
            self.open, self.length, self.last, self._summand = outer

    def takes(self, summand: Tensor) -> bool:
        """Tell whether the first block will take this rank's ``summand`` of its input, and sum what it keeps only."""
        if not self.running or self.open or torch.compiler.is_compiling() or not self._splits(summand):
            return False
        if self._summand is not None:  # whatever the first one was for was given a summand
            raise self._changed()
        self._summand = weakref.ref(summand), _version(summand)
        setattr(summand, _SUMMAND, True)
        return True

    def begin(self, x: Tensor) -> Tensor:
        """Split the tokens of ``x`` (B, S, ...), which the first block is called with, if each rank gets one."""
        self.open, self._summed = True, self._summand is not None
        self.last = self.length = x.size(1) if self._splits(x) else None
        if self._summand is not None:
            summand, version = self._summand
            if summand() is not x or _version(x) != version:
                raise self._changed()
        return x if self.length is None else self.own(x)

    def own_again(self, x: Tensor) -> Tensor:
        """Do what `own` did, when the first block is recomputed.

        Raises:
            NotSupportedError: ``x`` was a summand, and cannot be told to be one any more.
        """
        if self._summed and not getattr(x, _SUMMAND, False):
            raise NotSupportedError(
                "a checkpoint around the call of the first block recomputes it with a copy of its input (save_on_cpu "
                "makes such), which under sequence parallelism is this rank's summand only. Use "
                "model.gradient_checkpointing_enable(), or remove embedding= from the policy's sequence row."
            )
        return self.own(x)

    def own(self, x: Tensor) -> Tensor:
        """Return the tokens that this rank keeps of ``x``: the first block's input, or this rank's summand of it."""
        keep = leave_to_sequence if getattr(x, _SUMMAND, False) else scatter_sequence
        return keep(x, self.context.group)

    def _splits(self, x: Tensor) -> bool:
        return x.ndim >= 3 and x.size(1) >= self.context.size

    def _changed(self) -> NotSupportedError:
        return NotSupportedError(
            "under sequence parallelism the first block takes what the embedding returns as it is, and sums only the "
            "tokens that a rank keeps; something between them has changed or replaced it. Do that in a forward hook of "
            "the embedding, which then sums by itself, or remove embedding= from the policy's sequence row."
        )

    def end(self, x: Tensor) -> Tensor:
        """Return the tokens of all ranks, (B, S, ...)."""
        length, self.length, self.open = self.length, None, False
        return x if length is None else gather_sequence(x, self.context.group, length)

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


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version  # those of inference mode count none


class TokenStack(SwappedModule):
    """The module whose forward runs the blocks: tokens are split only inside it.

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


class TokenBlock(SwappedModule):
    """A block of a stack. The first one that is called splits the tokens; inside, each rank draws its own numbers.

    Options:
        argument: name and position of the argument with the tokens.
        tokens: the `TokenSplit`.
    """

    keeps_name: ClassVar[bool] = True

    _tokens: TokenSplit
    _tokens_argument: tuple[str, int]
    _tokens_dropouts: DropoutSites

    @classmethod
    def adopt(cls, module: nn.Module, context: ShardContext, **options: Any) -> Self:
        """See `SwappedModule.adopt`."""
        dropouts = DropoutSites([module])
        new = super().adopt(module, context)
        new.__dict__["_tokens"] = options["tokens"]
        new.__dict__["_tokens_argument"] = options["argument"]
        new.__dict__["_tokens_dropouts"] = dropouts
        return new

    # Not a hook and not the forward: checkpoints and FSDP2 are inside this call, so that neither repeats the split.
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Split the tokens if no block of the stack has yet, and run the block for their number."""
        tokens = self._tokens
        if tokens.running:
            if not tokens.open:
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
            return self._with_argument(tokens.own_again(x), args, kwargs)
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


class TokenEnd(SwappedModule):
    """The last module of a stack: its output is whole again.

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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module and gather its output, if tokens are split."""
        out = super().__call__(*args, **kwargs)
        tokens = self._tokens
        if not (tokens.running and tokens.open):
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
