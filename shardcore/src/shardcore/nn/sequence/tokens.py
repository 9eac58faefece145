"""The modules of a stack of blocks by which its tokens are split over the ranks: the stack, its blocks, and its end.

Each block passes the number of tokens to its own forward as an argument, so that a checkpoint which recomputes the
block later, perhaps after another call, recomputes it for the same number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from shardcore._torch import backward_task
from shardcore.comm.sequence import local_tokens, scatter_sequence
from shardcore.errors import NotSupportedError, ShardcoreError
from shardcore.nn.arguments import Argument
from shardcore.nn.base import ParallelMixin
from shardcore.nn.randomness import DropoutSites
from shardcore.nn.sequence.shard import SequenceShard

# Carries the number of tokens from a block's call into its forward, through whatever recomputes it.
_CARRIED = "_shardcore_tokens"


class SequenceModule(ParallelMixin):
    """A module that changes a `SequenceShard`, which is the option ``tokens``."""

    keeps_name: ClassVar[bool] = True
    kept_options: ClassVar[Mapping[str, str]] = {"tokens": "_tokens"}

    _tokens: SequenceShard


class SequenceStack(SequenceModule):
    """The module whose forward runs the blocks: only while it runs are tokens split."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the native forward, which has to end after its tokens were gathered."""
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
        argument: the one with the tokens.
        dropouts: where numbers may be drawn in it.
    """

    kept_options: ClassVar[Mapping[str, str]] = {
        **SequenceModule.kept_options,
        "argument": "_tokens_argument",
        "dropouts": "_tokens_dropouts",
    }

    _tokens_argument: Argument
    _tokens_dropouts: DropoutSites

    # Not a hook and not the forward: checkpoints and FSDP2 are inside this call, so that neither repeats the split.
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Split the tokens if this is the first block that is called, and run the block for their number."""
        tokens = self._tokens
        if tokens.phase != "outside":
            if tokens.phase != "inside":
                args, kwargs = self._tokens_argument.changed(args, kwargs, tokens.scatter)
            length = tokens.length
        elif not torch.compiler.is_compiling() and backward_task() != -1:
            # Recomputed by a checkpoint that somebody put around the call.
            args, kwargs = self._tokens_argument.changed(args, kwargs, self._again)
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
        tokens = self._tokens
        draws = tokens.length is not None and (
            # In eager mode whatever draws numbers inside need not be known.
            (not torch.compiler.is_compiling() and tokens.context.random.in_use) or self._tokens_dropouts.live()
        )
        if not draws:
            return super().forward(*args, **kwargs)
        tokens.context.random.fork(id(self))
        try:
            return super().forward(*args, **kwargs)
        finally:
            tokens.context.random.join(id(self))

    def _again(self, x: Tensor) -> Tensor:
        tokens = self._tokens
        if tokens.last is None:
            return x
        if x.is_leaf and x.requires_grad:
            raise NotSupportedError(
                f"a reentrant checkpoint around a {type(self).__name__} under sequence parallelism: it cannot tell for "
                "how many tokens it recomputes. Say use_reentrant=False, or model.gradient_checkpointing_enable()."
            )
        if x.size(1) == tokens.last:
            return scatter_sequence(x, tokens.context.channel)
        tokens.expect(x, local_tokens(tokens.last, tokens.context.size), type(self).__name__)
        return x


class SequenceEnd(SequenceModule):
    """The last module of a stack: its output is gathered."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module and gather its output, if tokens are split."""
        tokens = self._tokens
        out = super().__call__(*args, **kwargs)
        return put_together(out, tokens.gather, type(self).__name__) if tokens.phase == "inside" else out


def put_together(out: Any, gather: Callable[[Tensor], Tensor], where: str) -> Any:
    """Return what the last module of a stack, ``where``, returns, a tensor or a tuple, with the tokens of all ranks."""
    if isinstance(out, Tensor):
        return gather(out)
    if isinstance(out, tuple):  # as blocks of some libraries return their outputs, hidden states first
        return (gather(out[0]), *out[1:])
    raise NotSupportedError(
        f"{where} returns a {type(out).__name__}, of which it is not known what the hidden states are, whose tokens "
        "are put together; wanted a tensor, or a tuple that begins with it"
    )
