"""The modules by which tokens are divided over the ranks of ``cp``: a stack, its blocks, its end, and the whole model.

Each block passes the places of the tokens to its own forward as an argument, so that a checkpoint which recomputes it
later, perhaps after another call, recomputes it for the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from shardcore._torch import backward_task
from shardcore.errors import NotSupportedError, ShardcoreError
from shardcore.mesh.context import ShardContext
from shardcore.nn.arguments import Argument
from shardcore.nn.base import ParallelMixin
from shardcore.nn.context.logits import DividedLogits
from shardcore.nn.context.places import Places
from shardcore.nn.context.shard import ContextShard
from shardcore.nn.randomness import DropoutSites
from shardcore.nn.sequence.tokens import put_together

# Carries the places from a block's call into its forward, through whatever recomputes it.
_CARRIED = "_shardcore_places"


class _ContextModule(ParallelMixin):
    """A module that changes a `ContextShard`, which is the option ``shard``."""

    keeps_name: ClassVar[bool] = True
    kept_options: ClassVar[Mapping[str, str]] = {"shard": "_context"}

    _context: ContextShard
    _context_names: tuple[str, ...]  # of the arguments of its forward

    @classmethod
    @override
    def swap_class(cls, module: nn.Module, context: ShardContext, **options: Any) -> Self:
        names = tuple(inspect.signature(module.forward).parameters)
        new = super().swap_class(module, context, **options)
        new.__dict__["_context_names"] = names
        return new

    def _context_cache(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the cache that a call was given, or None; refuse to make one, in the outermost call."""
        given = {**dict(zip(self._context_names, args, strict=False)), **kwargs}
        asks, caches = self._context.library.uses_cache, self._context.library.caches
        cache = next((given[name] for name in caches if given.get(name) is not None), None)
        # Inside of the whole model it may be that model's default.
        if given.get(asks) and cache is None and not self._context.divides_logits:
            raise NotSupportedError(
                f"{asks}=True under context parallelism, where each rank would return the keys and values of its own "
                f"tokens alone. Give the cache that is to be filled ({' or '.join(caches)}), as generate() does: "
                f"it gets those of all ranks. Or leave {asks} out"
            )
        return cache


class ContextStack(_ContextModule):
    """The module whose forward runs the blocks: only while it runs are tokens divided.

    In calls with a cache that holds something they are not: it would get the keys of one rank.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the native forward, which may make no cache, and has to end after its tokens were put together."""
        shard = self._context
        if shard.phase != "outside":
            raise NotSupportedError(f"a {type(self).__name__} inside of itself under context parallelism")
        cache = self._context_cache(args, kwargs)
        fill = None if cache is None else shard.library.filling(cache)
        shard.phase, shard.last = "before" if cache is None or fill else "whole", None
        if not shard.divides_logits:  # the whole model is not running
            args, kwargs = tree_map_only(Tensor, shard.given, (args, kwargs))
        try:
            out = super().forward(*args, **kwargs)
            if shard.divided:
                raise ShardcoreError(
                    f"{type(self).__name__} returned while its tokens were divided: the module that its policy gathers "
                    "them at was not called. Correct gather= in the policy, or shard without context_parallel_size."
                )
            if fill:
                fill(shard)
            return _returned(out, shard, keeps=True, cached=cache is not None)
        finally:
            shard.phase, shard.now = "outside", None


class ContextBlock(_ContextModule):
    """A block of a stack. The first one that is called divides the tokens; each takes its own of the other arguments.

    Options:
        argument: the one with the tokens.
        dropouts: where numbers may be drawn in it.
    """

    kept_options: ClassVar[Mapping[str, str]] = {
        **_ContextModule.kept_options,
        "argument": "_context_argument",
        "dropouts": "_context_dropouts",
    }

    _context_argument: Argument
    _context_dropouts: DropoutSites

    # Not a hook and not the forward: checkpoints and FSDP2 are inside this call, so that neither repeats the division.
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Divide the tokens if this is the first block that is called, and run the block for its part."""
        shard = self._context
        if shard.phase == "before":
            args, kwargs = self._context_argument.changed(args, kwargs, self._context_first)
        elif shard.phase == "outside" and not torch.compiler.is_compiling() and backward_task() != -1 and shard.last:
            raise NotSupportedError(
                f"a checkpoint around the call of a {type(self).__name__} under context parallelism recomputes it "
                "without knowing its tokens: say model.gradient_checkpointing_enable()"
            )
        if not shard.divided or (places := shard.last) is None:
            return super().__call__(*args, **kwargs)
        place = self._context_argument.position
        names = self._context_names
        args = tuple(x if i == place else self._context_own(names[i], x, places) for i, x in enumerate(args))
        of_tokens = self._context_argument.name
        kwargs = {name: x if name == of_tokens else self._context_own(name, x, places) for name, x in kwargs.items()}
        return super().__call__(*args, **kwargs, **{_CARRIED: places})

    def _context_first(self, x: Tensor) -> Tensor:
        places = self._context.begin(x.size(0), x.size(1))
        return x if places is None else self._context.own(x, places)

    def _context_own(self, name: str, value: Any, places: Places) -> Any:
        """Return what the block is given of an argument."""
        if isinstance(value, tuple | list):
            return type(value)([self._context_own(name, each, places) for each in value])
        if not isinstance(value, Tensor) or value.ndim == 0:
            return value
        known = self._context.library.arguments
        if name not in known:
            raise NotSupportedError(
                f"{type(self).__name__} was given a tensor {tuple(value.shape)} as {name!r}, and context parallelism "
                "does not know whether it has a value for each token: do not pass it, or shard without "
                "context_parallel_size"
            )
        dim = known[name]
        return value if dim is None else self._context.own(value, places, dim)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the native forward for the places that `__call__` has passed."""
        shard, places = self._context, kwargs.pop(_CARRIED, None)
        if places is None:
            return super().forward(*args, **kwargs)
        before, shard.now, attended = shard.now, places, shard.attended
        try:
            out = self._context_run(*args, **kwargs)
        finally:
            shard.now = before
        if shard.attended == attended:
            raise NotSupportedError(
                f"no attention of this {type(self).__name__} has asked other ranks for their tokens: the attention of "
                "the model is not the one that it had in shard(). Set it before that (attn_implementation=...)"
            )
        return out

    def _context_run(self, *args: Any, **kwargs: Any) -> Any:
        if not self._context_dropouts.live():
            return super().forward(*args, **kwargs)
        shard = self._context
        random = shard.context.random
        random.fork(key := ("context", id(self)), rank=shard.rank)
        try:
            return super().forward(*args, **kwargs)
        finally:
            random.join(key)


class ContextEnd(_ContextModule):
    """The last module of a stack: the tokens of all ranks are put together in its output."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module and gather its output, if tokens are divided."""
        shard = self._context
        out = super().__call__(*args, **kwargs)
        if not shard.divided or (places := shard.last) is None:
            return out
        shard.phase = "whole"
        return put_together(out, lambda x: shard.whole(x, places), type(self).__name__)


class ContextModel(_ContextModule):
    """The whole model: what it returns has all tokens, but for logits that stay divided, and no cache has some.

    Options:
        keeps: whether logits stay divided in calls that return a loss.
    """

    kept_options: ClassVar[Mapping[str, str]] = {"shard": "_context", "keeps": "_context_keeps"}

    _context_keeps: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the native forward, unless attention weights are asked for."""
        asked = kwargs.get("output_attentions")
        if asked or (asked is None and getattr(getattr(self, "config", None), "output_attentions", False)):
            raise NotSupportedError(
                "output_attentions=True under context parallelism: no rank has the attention weights, which are S x S. "
                "Do not ask for them, or shard without context_parallel_size"
            )
        shard = self._context
        cached = self._context_cache(args, kwargs) is not None
        args, kwargs = tree_map_only(Tensor, shard.given, (args, kwargs))
        for stack in shard.stacks:
            stack.divides_logits = True
        try:
            out = super().forward(*args, **kwargs)
        finally:
            for stack in shard.stacks:
                stack.divides_logits = False
        keeps = self._context_keeps and isinstance(out, Mapping) and out.get("loss") is not None
        # Several stacks have each put together what they captured.
        return _returned(out, shard, keeps=keeps, cached=cached, captured=len(shard.stacks) == 1)


def _returned(out: Any, shard: ContextShard, *, keeps: bool, cached: bool, captured: bool = True) -> Any:
    """Return an output, with ``captured`` ones in it, with all tokens, and without a cache that nobody asked for."""
    if shard.last is None or not isinstance(out, Mapping | tuple):
        return out

    def whole(value: Any) -> Any:
        if isinstance(value, DividedLogits):
            return value if keeps or value.lazy else value.full_tensor()
        return tuple(map(shard.whole_captured, value)) if captured and isinstance(value, tuple) else value

    leaves_out: Callable[[Any], bool] = (lambda value: False) if cached else shard.library.is_cache
    if isinstance(out, tuple):
        return tuple(whole(value) for value in out if not leaves_out(value))
    return type(out)(**{name: whole(value) for name, value in out.items() if not leaves_out(value)})
