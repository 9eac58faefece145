"""What an embedding sums under sequence parallelism: a rank's own tokens, and all of them as soon as somebody looks."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from token_net import GATHER, SCATTER, SUM, WIDTH, Block, Embeddings, Sent, Stack, build, compare, ids, shard
from torch import Tensor, nn
from torch.nn.modules import module as all_modules
from torch.utils.checkpoint import checkpoint

import shardcore
from shardcore import Policy
from shardcore.errors import NotSupportedError, ShardcoreError
from shardcore.styles import norm, region, sequence, vocab
from shardcore.testing.parity import assert_close, assert_same_gradients


def _lengths(tp: int) -> None:
    native = build()
    sharded = shard(native, tp)
    for length in range(1, 10):
        assert compare(native, sharded, length) == (length >= tp), length
    assert compare(native, copy.deepcopy(sharded), 7, 5)
    with Sent() as sent:
        out = sharded(ids())
        assert sent.names == [SCATTER] + 2 * [GATHER, SCATTER] + [GATHER]
        out.sum().backward()
    # Of the blocks, and once of what was added to the embedding; the partial gradients of 3 norms and 2 biases.
    assert sorted(sent.names[6:]) == sorted(3 * [GATHER] + 2 * [SCATTER] + 5 * [SUM])


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_own_tokens_are_summed(pool, tp):
    pool.run(_lengths, tp, world=tp)


# Each does something to a model, and returns what has a gradient to be compared, or is itself compared.
class _Shift(nn.Module):
    """A learned function of each token."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.shift = inner, nn.Parameter(torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float64))

    def forward(self, *args: Any) -> Tensor:
        return self.inner(*args) * self.shift


class _Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def _centred(x: Tensor) -> Tensor:
    return x - x.mean(1, keepdim=True)


def _shift(place: str) -> Callable[[nn.Module], list[Tensor]]:
    def touch(model: nn.Module) -> list[Tensor]:
        owner, _, name = place.rpartition(".")
        wrapped = _Shift(model.get_submodule(place))
        setattr(model.get_submodule(owner), name, wrapped)
        return [wrapped.shift]

    return touch


def _checkpointed(place: str, reentrant: bool) -> Callable[[nn.Module], list[Tensor]]:
    def touch(model: nn.Module) -> list[Tensor]:
        owner, _, name = place.rpartition(".")
        setattr(model.get_submodule(owner), name, _Checkpointed(model.get_submodule(place), reentrant))
        return []

    return touch


def _forward_hook(place: str) -> Callable[[nn.Module], list[Tensor]]:
    def touch(model: nn.Module) -> list[Tensor]:
        model.get_submodule(place).register_forward_hook(lambda module, args, out: _centred(out))
        return []

    return touch


def _pre_hook(place: str) -> Callable[[nn.Module], list[Tensor]]:
    def touch(model: nn.Module) -> list[Tensor]:
        model.get_submodule(place).register_forward_pre_hook(lambda module, args: (_centred(args[0]),))
        return []

    return touch


def _backward_pre_hook(place: str) -> Callable[[nn.Module], list[Tensor]]:
    def touch(model: nn.Module) -> list[Tensor]:
        seen: list[Tensor] = []
        model.get_submodule(place).register_full_backward_pre_hook(lambda module, gouts: seen.append(gouts[0]))
        return seen

    return touch


def _backward_hook(place: str) -> Callable[[nn.Module], list[Tensor]]:
    def touch(model: nn.Module) -> list[Tensor]:
        seen: list[Tensor] = []
        model.get_submodule(place).register_full_backward_hook(lambda module, gins, gouts: seen.append(gouts[0]))
        return seen

    return touch


def _own_forward(model: nn.Module) -> list[Tensor]:
    native = model.embeddings.forward
    model.embeddings.forward = lambda ids: _centred(native(ids))
    return []


def _own_checkpoint(model: nn.Module) -> list[Tensor]:
    norm = model.embeddings.norm
    native = norm.forward
    norm.forward = lambda x=None, input=None: checkpoint(native, x if input is None else input, use_reentrant=True)  # noqa: A006
    return []


def _own_call(model: nn.Module) -> list[Tensor]:
    base = type(model.stack)
    call = lambda self, x: base.__call__(self, _centred(x))  # noqa: E731
    model.stack.__class__ = type("Calling", (base,), {"__call__": call})
    return []


TOUCHES: dict[str, Callable[[nn.Module], list[Tensor]]] = {
    "a module around the embedding": _shift("embeddings.words"),
    "a module in the place of another": _shift("embeddings.last"),
    "a module around all embeddings": _shift("embeddings"),
    "a module around the norm": _shift("embeddings.norm"),
    "a module around the stack": _shift("stack"),
    "a checkpoint around the norm": _checkpointed("embeddings.norm", False),
    "a reentrant checkpoint around the norm": _checkpointed("embeddings.norm", True),
    "a checkpoint around the stack": _checkpointed("stack", False),
    "a reentrant checkpoint around the stack": _checkpointed("stack", True),
    "a hook on the embedding": _forward_hook("embeddings.words"),
    "a hook on the embeddings": _forward_hook("embeddings"),
    "a hook before the last of the embeddings": _pre_hook("embeddings.last"),
    "a hook before the stack": _pre_hook("stack"),
    "a backward hook on the embeddings": _backward_hook("embeddings"),
    "a hook before the backward of the embeddings": _backward_pre_hook("embeddings"),
    "a backward hook behind the norm": _backward_hook("embeddings.last"),
    "a forward on the instance": _own_forward,
    "a forward on the norm": _own_checkpoint,
    "a class on top with a call of its own": _own_call,
}


def _touched(name: str) -> None:
    native = build()
    sharded = shard(native)
    assert compare(native, sharded, 7, 5)
    for model in (native, sharded):
        model.zero_grad()
    extras = [TOUCHES[name](model) for model in (native, sharded)]
    assert not compare(native, sharded, 7, 5)
    for wanted, got in zip(*extras, strict=True):
        assert_close(*(t.grad if t.requires_grad else t for t in (wanted, got)), name, 1e-10)


# A module that is called with ids alone has no gradient of its input.
IDS_ONLY = pytest.mark.filterwarnings("ignore:Full backward hook is firing when gradients are computed with respect to")


@IDS_ONLY
@pytest.mark.parametrize("name", TOUCHES)
def test_all_tokens_are_summed_where_something_else_may_look(pool, name):
    pool.run(_touched, name, world=2)


def _for_all() -> None:
    native = build()
    sharded = shard(native)
    hooks = {
        "forward": lambda module, args, out: _centred(out) if isinstance(module, Embeddings) else None,
        "forward_pre": lambda module, args: (_centred(args[0]),) if isinstance(module, Stack) else None,
        "full_backward": lambda module, gins, gouts: seen.append(gouts[0]) if isinstance(module, Embeddings) else None,
    }
    for kind, hook in hooks.items():
        seen: list[Tensor] = []
        handle = getattr(all_modules, f"register_module_{kind}_hook")(hook)
        try:
            assert not compare(native, sharded), kind
        finally:
            handle.remove()
        for got, wanted in zip(seen[::2], seen[1::2], strict=True):
            assert_close(wanted, got, "what a hook sees", 1e-10)
        assert len(seen) == (2 if kind == "full_backward" else 0)
    assert compare(native, sharded)


@IDS_ONLY
def test_hooks_of_all_modules(pool):
    pool.run(_for_all, world=2)


def _class_patched() -> None:
    native = build()
    sharded = shard(native)
    forward = Embeddings.forward
    try:
        Embeddings.forward = lambda self, ids: _centred(forward(self, ids))  # type: ignore[method-assign]
        assert not compare(native, sharded)
    finally:
        Embeddings.forward = forward  # type: ignore[method-assign]
    assert compare(native, sharded)


def test_a_class_that_is_patched(pool):
    pool.run(_class_patched, world=2)


def _patched_before() -> None:
    native = build()
    forward = Embeddings.forward
    foreign: dict[str, Any] = {"__name__": "somebody.else", "forward": forward, "centred": _centred}
    exec("def patched(self, ids): return centred(forward(self, ids))", foreign)
    try:
        Embeddings.forward = functools.wraps(forward)(foreign["patched"])  # type: ignore[method-assign]
        assert not compare(native, shard(native))
    finally:
        Embeddings.forward = forward  # type: ignore[method-assign]
    call = nn.Module.__call__

    def traced(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call(self, *args, **kwargs)

    native.zero_grad()
    sharded = shard(native)
    try:
        nn.Module.__call__ = traced  # type: ignore[method-assign]
        assert not compare(native, sharded)
    finally:
        nn.Module.__call__ = call  # type: ignore[method-assign]
    assert compare(native, sharded)


def test_code_of_another_library(pool):
    pool.run(_patched_before, world=2)


class Nested(nn.Module):
    """Blocks, embedding and norm in containers that nobody calls, as in nanoGPT."""

    def __init__(self) -> None:
        super().__init__()
        words, blocks = nn.Embedding(13, WIDTH), nn.ModuleList(Block() for _ in range(2))
        self.parts = nn.ModuleDict({"words": words, "blocks": blocks, "norm": nn.LayerNorm(WIDTH)})

    def forward(self, ids: Tensor) -> Tensor:
        x = self.parts["words"](ids) * 2.0
        for block in self.parts["blocks"]:
            x = block(x)
        return self.parts["norm"](x)


def _rows_of_nested(**more: Any) -> Any:
    class NestedPolicy(Policy):
        def module_policy(self) -> Any:
            names = {"scatter": "parts.blocks[0]", "gather": "parts.norm", "embedding": "parts.words", **more}
            return {
                "Nested": [vocab("parts.words"), norm("parts.norm"), sequence(**names)],
                "Block": [norm("norm"), region(col="up", row="down")],
            }

    return NestedPolicy


def _nested() -> None:
    torch.manual_seed(0)
    native = Nested().double()
    split = functools.partial(shardcore.shard, tp=2, enable_sequence_parallelism=True)
    assert compare(native, split(copy.deepcopy(native), policy=_rows_of_nested()), 7, 5)
    wrong = split(copy.deepcopy(native), policy=_rows_of_nested(stack="parts"))
    with pytest.raises(ShardcoreError, match="the first block was not called with what its embedding looked up"):
        wrong(ids())


def test_containers_that_nobody_calls(pool):
    pool.run(_nested, world=2)


def _of_somebody_else() -> None:
    class Centring(Embeddings):
        __module__ = "somebody.else"

        def forward(self, ids: Tensor) -> Tensor:
            return _centred(super().forward(ids))

    native = build()
    native.embeddings.__class__ = Centring
    assert not compare(native, shard(native))


def test_a_subclass_of_another_library(pool):
    pool.run(_of_somebody_else, world=2)


def _alone() -> None:
    native = build()
    sharded = shard(native)
    with Sent() as sent:
        whole = sharded.embeddings(ids())
    assert sent.names == [SUM]
    assert_close(native.embeddings(ids()), whole, "embeddings", 1e-12)
    assert_close(native.stack(whole.detach()), sharded.stack(whole.detach()), "the stack alone", 1e-12)


def test_parts_that_are_called_alone_see_all_tokens(pool):
    pool.run(_alone, world=2)


def _again(when: str) -> None:
    native = build()
    native.again = when
    assert compare(native, shard(native), 7, 5)


@pytest.mark.parametrize("when", ["before", "after"])
def test_another_lookup_sees_all_tokens(pool, when):
    pool.run(_again, when, world=2)


def _replicas() -> None:
    native = build()
    sharded = shard(native, tp=2, dp=2)
    assert sharded._is_untouched()
    for model in (native, sharded):
        model(ids()).cos().sum().backward()
    assert_same_gradients(native, sharded)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view")
def test_under_fsdp(pool):
    pool.run(_replicas, world=4)


def _wrong(kind: str) -> None:
    """A model that does what its row excludes."""
    native = build()
    sharded = shard(native)
    if kind == "longer":
        sharded.between = lambda x: torch.cat([x, x[:, :1]], 1)
        with pytest.raises(NotSupportedError, match=r"looked up 7 tokens .* is called with 8"):
            sharded(ids())
    else:
        sharded.stack.skips = True
        with pytest.raises(ShardcoreError, match="returned while its tokens were split"):
            sharded(ids())
    sharded = shard(native)
    assert compare(native, sharded)


@pytest.mark.parametrize("kind", ["longer", "no block"])
def test_what_a_row_excludes_is_noticed(pool, kind):
    pool.run(_wrong, kind, world=2)


def _failed() -> None:
    native = build()
    sharded = shard(native)

    def fail(*args: Any) -> None:
        raise RuntimeError("on the way")

    for place in ("embeddings.norm", "stack.blocks.0", "stack.blocks.1", "head"):
        handle = sharded.get_submodule(place).register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="on the way"):
            sharded(ids())
        handle.remove()
        assert_close(native.embeddings(ids()), sharded.embeddings(ids()), f"embeddings after {place}", 1e-12)
        assert compare(native, sharded), place


def test_a_call_that_fails_leaves_nothing_behind(pool):
    pool.run(_failed, world=2)
