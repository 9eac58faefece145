"""What stands between a vocabulary-parallel embedding and the first block of a stack whose tokens are split.

The embedding sums the tokens that a rank keeps, and *places* them (`TokenSplit`). Whatever treats each token by itself
is right for those; anything else would be silently wrong. So they are placed only while everything on the way is what
it was when the model was sharded, and code of the library that the policy describes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook  # no public path

from shardcore.comm.sequence import place_tokens
from shardcore.mesh import ShardContext
from shardcore.nn.base import native_class
from shardcore.nn.entered_argument import EnteredArgument
from shardcore.nn.tokens import TokenModule

__all__ = ["TokenNorm", "TokenSource"]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class TokenSource(TokenModule):
    """The module whose forward looks up the embedding, and runs the blocks or calls the one that does.

    Options:
        tokens: the `TokenSplit`.
        split: the modules that work on split tokens (the blocks, the norm before them, the end).
    """

    _known: tuple[tuple[nn.Module, Callable[..., Any]], ...]
    _split: tuple[nn.Module, ...]

    @classmethod
    def adopt(cls, module: nn.Module, context: ShardContext, **options: Any) -> Self:
        """See `SwappedModule.adopt`."""
        new = super().adopt(module, context, **options)
        new.__dict__["_split"] = tuple(options["split"])
        known = tuple(new._walk())
        libraries = {name for m, forward in known for name in (_library(native_class(type(m))), _library(forward))}
        # Of one library: nobody has subclassed, or replaced, a part of what the policy describes.
        is_of_one = libraries <= {"torch", "shardcore", _library(native_class(type(new)))}
        new.__dict__["_known"] = known if is_of_one else ()
        return new

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the native forward; the embedding places what it sums if nobody else looks at it."""
        tokens = self._tokens
        outer = tokens.open(places=not torch.compiler.is_compiling() and self._is_untouched())
        try:
            return super().forward(*args, **kwargs)
        finally:
            tokens.stop(outer)

    def _walk(self) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
        """Yield this module, what is below it but for what works on split tokens, and the forward of each."""
        split = set(map(id, self._split))
        yield self, native_class(type(self)).forward
        below = list(self.children())
        while below:
            module = below.pop()
            if id(module) not in split:
                yield module, native_class(type(module)).forward
                below += module.children()

    # The same on all ranks as long as hooks are: it decides what is sent.
    def _is_untouched(self) -> bool:
        now = tuple(self._walk())
        return (
            now == self._known  # the same objects
            and not any("forward" in vars(m) for m, _ in now)
            and not any(_is_hooked(m) for m, _ in now[1:])
            and not _has_any_global_hook()
        )


def _is_hooked(module: nn.Module) -> bool:
    """Tell whether somebody else than shardcore would be shown what a module is called with, or a gradient of it."""
    return any(not isinstance(h, EnteredArgument) for name in _HOOKS for h in getattr(module, name).values())


def _library(thing: Any) -> str:
    return str(thing.__module__).partition(".")[0]


class TokenNorm(TokenModule):
    """A norm between the embedding and the first block: it works on the tokens that this rank keeps.

    Options:
        tokens: the `TokenSplit`.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the norm, on what this rank keeps of its input where that is placed."""
        tokens, length = self._tokens, self._tokens.placed
        if length is None:
            return super().__call__(*args, **kwargs)
        own = tokens.take(args[0])
        tokens.length = length  # after an error the source resets it
        out = super().__call__(own, *args[1:], **kwargs)
        tokens.length = None
        return place_tokens(out, tokens.context.group, length)
