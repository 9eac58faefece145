"""Sequence parallelism up to the first block: whatever stands or looks there gets all tokens, on one rank too."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from token_net import (
    GATHER,
    SCATTER,
    SUM,
    WIDTH,
    Block,
    Embeddings,
    ModelPolicy,
    Stack,
    build,
    compare,
    ids,
    shard,
)
from torch import Tensor, nn
from torch.nn.modules import module as all_modules
from torch.utils.checkpoint import checkpoint

import shardcore
from shardcore import Policy
from shardcore.errors import ShardcoreError
from shardcore.styles import norm, region, replicate, sequence, vocab
from shardcore_testing.observing import Collectives
from shardcore_testing.parity import assert_close, assert_same_gradients


def _lengths(tp: int) -> None:
    native = build()
    sharded = shard(native, tp)
    for length in range(1, 10):
        compare(native, sharded, length)
    compare(native, copy.deepcopy(sharded), 7, 5)
    with Collectives() as sent:
        out = sharded(ids())
        assert sent.names == [SUM] + 2 * [GATHER, SCATTER] + [GATHER]
        out.sum().backward()
    # Of the blocks, and of the first one's input; the partial gradients of the weights and biases of 2 norms, at once,
    # and of 2 biases.
    assert sorted(sent.names[6:]) == sorted(3 * [GATHER] + 2 * [SCATTER] + 4 * [SUM])


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_what_is_sent(pool, tp):
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
    extras = [TOUCHES[name](model) for model in (native, sharded)]
    compare(native, sharded, 7, 5)
    for wanted, got in zip(*extras, strict=True):
        assert_close(*(t.grad if t.requires_grad else t for t in (wanted, got)), name, 1e-10)


# A module that is called with ids alone has no gradient of its input.
IDS_ONLY = pytest.mark.filterwarnings("ignore:Full backward hook is firing when gradients are computed with respect to")


@IDS_ONLY
@pytest.mark.parametrize("name", TOUCHES)
def test_what_stands_before_the_blocks_sees_all_tokens(pool, name):
    pool.run(_touched, name, world=2)


# What changes nothing that is computed, and so may be on one rank only.
ON_ONE_RANK = [name for name in TOUCHES if "backward" in name or name == "a forward on the norm"]


def _touched_on_one_rank(name: str) -> None:
    native = build()
    sharded = shard(native)
    if dist.get_rank() == 0:
        TOUCHES[name](sharded)
    compare(native, sharded, 7, 5)


@IDS_ONLY
@pytest.mark.parametrize("name", ON_ONE_RANK)
def test_on_one_rank(pool, name):
    pool.run(_touched_on_one_rank, name, world=2)


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
            compare(native, sharded)
        finally:
            handle.remove()
        for got, wanted in zip(seen[::2], seen[1::2], strict=True):
            assert_close(wanted, got, "what a hook sees", 1e-10)
        assert len(seen) == (2 if kind == "full_backward" else 0)


@IDS_ONLY
def test_hooks_of_all_modules(pool):
    pool.run(_for_all, world=2)


def _class_patched() -> None:
    native = build()
    sharded = shard(native)
    forward = Embeddings.forward
    try:
        Embeddings.forward = lambda self, ids: _centred(forward(self, ids))  # type: ignore[method-assign]
        compare(native, sharded)
    finally:
        Embeddings.forward = forward  # type: ignore[method-assign]


def test_a_class_that_is_patched(pool):
    pool.run(_class_patched, world=2)


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
            names = {"scatter": "parts.blocks[0]", "gather": "parts.norm", **more}
            return {
                "Nested": [vocab("parts.words"), norm("parts.norm"), sequence(**names)],
                "Block": [norm("norm"), region(col="up", row="down")],
            }

    return NestedPolicy


def _nested() -> None:
    torch.manual_seed(0)
    native = Nested().double()
    split = functools.partial(shardcore.shard, tp=2, enable_sequence_parallelism=True)
    compare(native, split(copy.deepcopy(native), policy=_rows_of_nested()), 7, 5)


def test_containers_that_nobody_calls(pool):
    pool.run(_nested, world=2)


def _alone() -> None:
    native = build()
    sharded = shard(native)
    with Collectives() as sent:
        whole = sharded.embeddings(ids())
    assert sent.names == [SUM]
    assert_close(native.embeddings(ids()), whole, "embeddings", 1e-12)
    assert_close(native.stack(whole.detach()), sharded.stack(whole.detach()), "the stack alone", 1e-12)


def test_parts_that_are_called_alone_see_all_tokens(pool):
    pool.run(_alone, world=2)


def _again(when: str) -> None:
    native = build()
    native.again = when
    compare(native, shard(native), 7, 5)


@pytest.mark.parametrize("when", ["before", "after"])
def test_another_lookup_sees_all_tokens(pool, when):
    pool.run(_again, when, world=2)


def _replicas() -> None:
    native = build()
    sharded = shard(native, tp=2, dp=2)
    for model in (native, sharded):
        model(ids()).cos().sum().backward()
    assert_same_gradients(native, sharded)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view")
def test_under_fsdp(pool):
    pool.run(_replicas, world=4)


def _longer() -> None:
    native = build()
    sharded = shard(native)
    for model in (native, sharded):
        model.between = lambda x: torch.cat([x, x[:, :1]], 1)
        model.head.register_forward_pre_hook(lambda module, args: (args[0][:, :7],))
    compare(native, sharded)


def test_another_number_of_tokens(pool):
    pool.run(_longer, world=2)


def _no_end() -> None:
    class WrongPolicy(ModelPolicy):
        def module_policy(self) -> Any:
            rows = super().module_policy()
            tokens = sequence(scatter="stack.blocks[0]", gather="head", stack="stack")
            return {**rows, "Model": [replicate("head"), tokens]}

    sharded = shardcore.shard(build(), policy=WrongPolicy, tp=2, enable_sequence_parallelism=True)
    with pytest.raises(ShardcoreError, match="returned while its tokens were split"):
        sharded(ids())


def test_a_stack_that_ends_elsewhere_is_noticed(pool):
    pool.run(_no_end, world=2)


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
        states = native.embeddings(ids()).detach()
        for mine, theirs in zip(native.stack.blocks, sharded.stack.blocks, strict=True):  # whole tokens, by itself
            assert_close(mine(states), theirs(states), f"a block after {place}", 1e-12)
        compare(native, sharded)


def test_a_call_that_fails_leaves_nothing_behind(pool):
    pool.run(_failed, world=2)
