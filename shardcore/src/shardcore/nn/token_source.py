"""What stands between a vocabulary-parallel embedding and the first block of a stack whose tokens are split.

The embedding sums the tokens that a rank keeps, and *places* them (`TokenSplit`). Whatever treats each token by itself
is right for those; anything else would be silently wrong. So they are placed only while everything on the way is what
it was when the model was sharded, and code of the library that the policy describes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook  # no public path

from shardcore.comm.sequence import place_tokens
from shardcore.errors import ShardcoreError
from shardcore.mesh import ShardContext
from shardcore.nn.base import native_class
from shardcore.nn.entered_argument import EnteredArgument
from shardcore.nn.tokens import TokenModule, with_first

__all__ = ["TokenNorm", "TokenSource"]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class _Called(NamedTuple):
    """What a call of a module runs, whatever shardcore has swapped in."""

    module: nn.Module
    forward: Callable[..., Any]
    call: Callable[..., Any]

    def libraries(self) -> Iterator[str]:
        """Yield the names of the libraries that the code is of, of all that is wrapped in it too."""
        yield native_class(type(self.module)).__module__.partition(".")[0]
        for function in (self.forward, self.call):
            inner: Any = function
            while inner is not None:
                # Not __module__, which functools.wraps copies.
                yield getattr(inner, "__globals__", {}).get("__name__", "").partition(".")[0]
                inner = getattr(inner, "__wrapped__", None)


class TokenSource(TokenModule):
    """The module whose forward looks up the embedding, and runs the blocks or calls the one that does.

    Options:
        tokens: the `TokenSplit`.
        split: the modules that work on split tokens (the blocks and the end).
    """

    _known: tuple[_Called, ...]
    _split: tuple[nn.Module, ...]

    @classmethod
    def adopt(cls, module: nn.Module, context: ShardContext, **options: Any) -> Self:
        """See `SwappedModule.adopt`."""
        new = super().adopt(module, context, **options)
        new.__dict__["_split"] = tuple(options["split"])
        known = tuple(new._walk())
        # Of one library: nobody has subclassed, or replaced, a part of what the policy describes.
        libraries = {library for called in known for library in called.libraries()}
        own = native_class(type(new)).__module__.partition(".")[0]
        new.__dict__["_known"] = known if libraries <= {"torch", "shardcore", own} else ()
        return new

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the native forward; the embedding places what it sums if nobody else looks at it."""
        tokens = self._tokens
        outer = tokens.open(places=not torch.compiler.is_compiling() and self._is_untouched())
        try:
            out = super().forward(*args, **kwargs)
            if tokens.placed is not None:
                raise ShardcoreError(
                    f"{type(self).__name__} returned though the first block was not called with what its embedding "
                    "looked up: each rank has summed its own tokens only. Correct stack=, or remove embedding=, in "
                    "the policy's sequence row, or turn sequence parallelism off."
                )
            return out
        finally:
            tokens.stop(outer)

    def _walk(self) -> Iterator[_Called]:
        """Yield this module, and what is below it but for what works on split tokens."""
        split = set(map(id, self._split))
        below: list[nn.Module] = [self]
        while below:
            module = below.pop()
            if id(module) not in split:
                native = native_class(type(module))
                yield _Called(module, native.forward, native.__call__)
                below += module.children()

    # The same on all ranks as long as hooks are: it decides what is sent.
    def _is_untouched(self) -> bool:
        now = tuple(self._walk())
        return (
            now == self._known  # the same objects
            and not any("forward" in vars(called.module) for called in now)
            and not any(_is_hooked(called.module) for called in now[1:])
            and not _has_any_global_hook()
        )


def _is_hooked(module: nn.Module) -> bool:
    """Tell whether somebody else than shardcore would be shown what a module is called with, or a gradient of it."""
    return any(not _is_harmless(hook) for name in _HOOKS for hook in getattr(module, name).values())


def _is_harmless(hook: Any) -> bool:
    if isinstance(hook, EnteredArgument):
        return True
    # Of gradient_checkpointing_enable() in transformers: it only says that the output requires a gradient.
    name, module = (getattr(hook, attribute, "") for attribute in ("__name__", "__module__"))
    return name == "make_inputs_require_grads" and module == "transformers.modeling_utils"


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
        args, kwargs = with_first(tokens.take, args, kwargs)
        tokens.length = length  # after an error the source resets it
        out = super().__call__(*args, **kwargs)
        tokens.length = None
        return place_tokens(out, tokens.context.group, length)
