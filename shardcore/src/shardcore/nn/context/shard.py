"""How the tokens of a stack of blocks are divided over the ranks of ``cp``, for the call that is running."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from shardcore._private import CONTEXT, require
from shardcore.comm.collectives import Channel
from shardcore.errors import NotSupportedError
from shardcore.mesh.context import ShardContext
from shardcore.nn.context.places import Places, gather_tokens, sum_of_ranks, tokens_of, total
from shardcore.nn.libraries import ask

_SHARD, _CROSSES = "_shardcore_context_shard", "_shardcore_context_crosses"


class DividedAttention(Protocol):
    """What a library's client says of its attention, and does about it; ``CONTEXT`` of the client.

    Attributes:
        arguments: of blocks, that hold a value for each token -> the dim of tokens; None where attention sees to it.
        caches: the arguments of a stack that hold keys and values of earlier calls.
        uses_cache: the one that asks for such a thing to be made.
    """

    arguments: Mapping[str, int | None]
    caches: tuple[str, ...]
    uses_cache: str

    def lacks(self) -> str | None:
        """Say what the installed release of the library lacks, because of which nothing can be divided, or None."""

    def reason(self, model: nn.Module) -> str | None:
        """Say why nothing can be divided in a model whose policy does not say where, if that is known."""

    def problem(self, model: nn.Module, attentions: tuple[nn.Module, ...], *, ring: bool) -> str | None:
        """Say why these attentions of a model cannot be divided, or return None; ``ring``: keys and values go round."""

    def is_cache(self, value: Any) -> bool:
        """Tell whether an output of a model holds keys and values."""

    def filling(self, cache: Any) -> Callable[[ContextShard], None] | None:
        """Return what gives a cache, which a call with divided tokens has filled, the keys and values of all ranks.

        None where it cannot be filled so, since it holds some already: the tokens of such a call are not divided.
        """

    def divide(self, model: nn.Module) -> None:
        """Let attentions that have a shard (`shard_of`) attend to tokens of other ranks."""


@dataclass(frozen=True, slots=True)
class Groups:
    """The ranks of ``cp``: those that exchange heads, and those between which keys and values go round.

    Attributes:
        everybody: all of them.
        heads: neighbours among them; None if no heads are exchanged.
        ring: one of each such group, this rank's place in it; None if nothing goes round.
    """

    everybody: Channel
    heads: Channel | None
    ring: Channel | None

    def places(self, length: int, *, zigzag: bool) -> Places:
        """Divide ``length`` tokens over the ranks."""
        heads, rings = self.heads.size if self.heads else 1, self.ring.size if self.ring else 1
        return Places.of(length, heads, rings, zigzag=zigzag)


@dataclass(eq=False)
class ContextShard:
    """How the tokens of one stack of blocks are divided.

    Attributes:
        context: of the sharded model.
        groups: the ranks of ``cp``.
        library: what the library says of its attention.
        zigzag: see `Places.of`.
        now: the places in the block that is running; None where tokens are not divided: outside of the stack, in calls
            with a cache or few tokens.
        last: those of the last forward of the stack.
        rows: how many rows it had.
        phase: of the forward of the stack.
        attended: how many attentions have run on divided tokens.
        divides_logits: whether the whole model is running, which takes divided logits from its head.
        stacks: all of the model, of which this is one.
    """

    context: ShardContext
    groups: Groups
    library: DividedAttention
    zigzag: bool
    now: Places | None = None
    last: Places | None = None
    rows: int = 0
    phase: Literal["outside", "whole", "before", "inside"] = "outside"
    attended: int = 0
    divides_logits: bool = False
    stacks: list[ContextShard] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stacks.append(self)

    @property
    def rank(self) -> int:
        """This rank's position on ``cp``."""
        return self.groups.everybody.rank

    @property
    def divided(self) -> bool:
        """Whether tokens are divided, and not put together yet."""
        return self.phase == "inside" and self.last is not None

    def begin(self, rows: int, tokens: int) -> Places | None:
        """Return how a call with so many tokens is divided, which it is from now on; None if there are too few."""
        size = self.groups.everybody.size
        self.phase, self.rows = "inside", rows
        self.last = self.groups.places(tokens, zigzag=self.zigzag) if tokens >= 2 * size else None
        return self.last

    def given(self, x: Tensor) -> Tensor:
        """Return an argument of the model's; each rank has its own tokens' gradient, and what counts is their mean."""
        if torch.is_grad_enabled() and x.requires_grad:
            x = x.view_as(x)
            x.register_hook(lambda grad: sum_of_ranks(grad, self.groups.everybody) / self.groups.everybody.size)
        return x

    def own(self, x: Tensor, places: Places, dim: int = 1) -> Tensor:
        """Return this rank's tokens of ``x``, which has all of them along ``dim``, or one for all."""
        dim += x.ndim if dim < 0 else 0
        if x.size(dim) == 1 < places.length:
            return x
        if x.size(dim) != places.length:
            raise NotSupportedError(
                f"a block got a tensor {tuple(x.shape)} under context parallelism, where {places.length} tokens were "
                f"expected in dim {dim}; shard without context_parallel_size, or do not pass it"
            )
        return tokens_of(x, places.ranks[self.rank], dim)

    def whole(self, x: Tensor, places: Places) -> Tensor:
        """Return the tokens of all ranks, (B, L, ...) to (B, S, ...)."""
        return gather_tokens(x, self.groups.everybody, places)

    def whole_captured(self, x: Any) -> Any:
        """Return an output captured in the last forward with the tokens of all ranks; others as they are."""
        places = self.last
        if places is None or not isinstance(x, Tensor):
            return x
        own = total(places.ranks[self.rank])
        if x.ndim == 2 and x.size(0) == self.rows * own:  # routers score the tokens of all rows in one dim
            return self.whole(x.unflatten(0, (self.rows, own)), places).flatten(0, 1)
        if x.ndim < 3 or x.size(1) == places.length:
            return x
        if x.size(1) != own:
            raise NotSupportedError(
                f"the model would return a tensor {tuple(x.shape)} that it captured from a layer, which has neither "
                f"all {places.length} tokens nor those of this rank: do not ask for it, or shard without "
                "context_parallel_size"
            )
        return self.whole(x, places)


def divided_attention(model: nn.Module) -> DividedAttention | None:
    """Return what the client of the library of ``model``, or of its bases, says; None if there is none."""
    require(CONTEXT)
    found: DividedAttention | None = None
    for cls in type(model).__mro__:
        found = found or ask(cls.__module__.partition(".")[0], "CONTEXT")
    return found


def shard_of(module: nn.Module) -> ContextShard | None:
    """Return the shard that the tokens of an attention belong to, None if it has all of them in any call."""
    return module.__dict__.get(_SHARD)


def set_shard(module: nn.Module, shard: ContextShard, *, crosses: bool = False) -> None:
    """Let the tokens of an attention be divided as ``shard`` says; one that ``crosses`` has keys of another stack."""
    module.__dict__[_SHARD], module.__dict__[_CROSSES] = shard, crosses


def crosses(module: nn.Module) -> bool:
    """Tell whether the keys of an attention are states of another stack, of which every rank has all."""
    return bool(module.__dict__.get(_CROSSES))
