"""Calls that do not come in through the model's own call: parts by themselves, forwards, in any order, under FSDP2."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import TinyPolicy, batch, build, randomize, twins
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.utils.checkpoint import checkpoint

import shardcore
from shardcore.mesh.context import context_of
from shardcore_testing.observing import Collectives
from shardcore_testing.parity import assert_close, assert_same_gradients

#: The sizes of the meshes: sharded, replicated, both, and the first two with tensor parallelism.
MESHES = {
    "dp_shard": {"tp": 1, "dp": 2},
    "dp_replicate": {"tp": 1, "dp_replicate_size": 2},
    "tp-dp_shard": {"tp": 2, "dp": 2},
    "tp-dp_replicate": {"tp": 2, "dp_replicate_size": 2},
    "hybrid": {"tp": 1, "dp_replicate_size": 2, "dp_shard_size": 2},
}


def _stack(model: Any, ids: Tensor) -> Tensor:
    return model.model(ids)


def _head_on_stack(model: Any, ids: Tensor) -> Tensor:
    return model.head(model.model(ids))


def _head_in_chunks(model: Any, ids: Tensor) -> Tensor:
    hidden = model.model(ids)
    return torch.cat([model.head(chunk) for chunk in hidden.split(3, 1)], 1)


def _embedding_first(model: Any, ids: Tensor) -> Tensor:
    return model(inputs=model.model.embed(ids))


def _block_first(model: Any, ids: Tensor) -> Tensor:
    hidden = torch.nn.functional.one_hot(ids % 32, 32).double()
    return model(inputs=model.model.layers[1](hidden))


def _by_hand(model: Any, ids: Tensor) -> Tensor:
    hidden = model.model.embed(ids)
    for layer in model.model.layers:
        hidden = layer(hidden)
    return model.head(model.model.norm(hidden))


def _inside_of_blocks(model: Any, ids: Tensor) -> Tensor:
    hidden = model.model.embed(ids)
    for layer in model.model.layers:
        hidden = hidden + layer.attention(layer.norm1(hidden))
        hidden = hidden + layer.mlp(layer.norm2(hidden))
    return model.head(hidden)


def _forwards(model: Any, ids: Tensor) -> Tensor:
    hidden = model.model.forward(ids)
    for layer in model.model.layers:
        hidden = layer.forward(hidden)
    return model.head.forward(hidden) + model.forward(ids)


def _checkpointed(model: Any, ids: Tensor) -> Tensor:
    hidden = checkpoint(model.model, ids, use_reentrant=False)
    hidden = checkpoint(model.model.layers[0], hidden, use_reentrant=False)
    return checkpoint(model.head, hidden, use_reentrant=False)


def _checkpointed_reentrantly(model: Any, ids: Tensor) -> Tensor:
    hidden = checkpoint(model.model.layers[0], model.model.embed(ids), use_reentrant=True)
    return checkpoint(model.head, hidden, use_reentrant=True)


def _mixed(model: Any, ids: Tensor) -> Tensor:
    hidden = model.model.layers[1](model.model.embed(ids))
    logits = model(ids)
    return logits + model.head(hidden) + model.head(model.model(ids)) + model(inputs=hidden)


WAYS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    function.__name__.strip("_"): function
    for function in (
        _stack,
        _head_on_stack,
        _head_in_chunks,
        _embedding_first,
        _block_first,
        _by_hand,
        _inside_of_blocks,
        _forwards,
        _checkpointed,
        _checkpointed_reentrantly,
        _mixed,
    )
}


def _made(sizes: dict[str, int], **options: Any) -> tuple[Any, Any, slice]:
    reference = build(**options)
    sharded = shardcore.shard(copy.deepcopy(reference), policy=TinyPolicy, **sizes)
    context = context_of(sharded)
    replicas = context.sizes.replicas
    rows = 4 // replicas
    return reference, sharded, slice(rows * context.replica, rows * (context.replica + 1))


def _beside(way: Callable[[Any, Tensor], Tensor], reference: Any, sharded: Any, own: slice, seed: int) -> None:
    ids = batch(seed, rows=4)
    wanted, got = way(reference, ids), way(sharded, ids[own])
    assert_close(wanted[own], got, "output")
    weights = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(seed), dtype=wanted.dtype)
    (wanted * weights).mean().backward()
    (got * weights[own]).mean().backward()


def _step(*models: Any) -> None:
    for model in models:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model.zero_grad()


def every_way(sizes: dict[str, int], options: dict[str, Any], ways: tuple[str, ...] = tuple(WAYS)) -> None:
    for name in ways:
        way = WAYS[name]
        reference, sharded, own = _made(sizes, **options)
        try:
            for seed in range(2):  # the first call ever, and one that adds to its gradients
                _beside(way, reference, sharded, own, seed)
            assert_same_gradients(reference, sharded)
            _step(reference, sharded)
            with torch.no_grad():
                assert_close(*(WAYS["stack"](m, batch(3)) for m in (reference, sharded)), "evaluated")
            for seed, each in enumerate((lambda m, ids: m(ids), way)):
                _beside(each, reference, sharded, own, seed)
            assert_same_gradients(reference, sharded)
        except Exception as error:
            error.add_note(name)
            raise


@pytest.mark.parametrize("mesh", MESHES)
def test_every_way_to_call_a_model(pool, mesh):
    sizes = MESHES[mesh]
    world = 4 if mesh == "hybrid" or sizes["tp"] > 1 else 2
    every = mesh in ("dp_shard", "tp-dp_shard")
    pool.run(every_way, sizes, {}, tuple(WAYS) if every else ("by_hand", "mixed"), world=world)


@pytest.mark.nightly
def test_tied_weights(pool):
    ways = ("head_on_stack", "by_hand", "mixed")
    pool.run(every_way, MESHES["dp_shard"], {"tied": True}, ways, world=2)
    pool.run(every_way, MESHES["tp-dp_shard"], {"tied": True, "checkpoint": "non-reentrant"}, ways, world=4)


def counts() -> None:
    _, sharded, own = _made(MESHES["dp_shard"])
    ids = batch(0, rows=4)[own]

    def collectives(way: Callable[[Any, Tensor], Tensor]) -> tuple[int, int, int]:
        with Collectives() as forward:
            loss = way(sharded, ids).mean()
        with Collectives() as backward:
            loss.backward()
        return forward.count, backward.counts["allgather_base"], backward.counts["reduce_scatter_base"]

    # Of two blocks and of what is in neither: as many as FSDP2 alone needs, whatever comes first.
    assert collectives(WAYS["by_hand"]) == (3, 4, 5)
    assert collectives(lambda model, ids: model(ids)) == (3, 2, 3)
    assert collectives(WAYS["stack"]) == (3, 2, 3)
    assert collectives(WAYS["head_on_stack"]) == (3, 3, 4)  # the head's gradients are reduced before the embedding's


def test_number_of_collectives(pool):
    pool.run(counts, world=2)


def after_an_evaluation(sizes: dict[str, int]) -> None:
    reference, sharded, own = _made(sizes)
    held = {name: id(p) for name, p in sharded.named_parameters()}
    for evaluate in (lambda m: m(batch()), lambda m: m.forward(batch()), lambda m: m.head(m.model(batch()))):
        _beside(lambda m, ids: m(ids), reference, sharded, own, 0)
        with torch.no_grad():
            assert_close(evaluate(reference), evaluate(sharded), "evaluated")
        assert {name: id(p) for name, p in sharded.named_parameters()} == held
        assert_same_gradients(reference, sharded)
        _step(reference, sharded)
    _beside(lambda m, ids: m(ids), reference, sharded, own, 1)
    assert_same_gradients(reference, sharded)


@pytest.mark.parametrize("mesh", ["dp_shard", "dp_replicate"])
def test_an_evaluation_before_a_step(pool, mesh):
    pool.run(after_an_evaluation, MESHES[mesh], world=2)


def changed_in_place() -> None:
    reference, sharded, own = _made(MESHES["dp_shard"])

    def way(model: Any, ids: Tensor) -> Tensor:
        logits = model.head(model.model(ids))
        logits += model.model.layers[0].mlp.down(torch.ones(44, dtype=logits.dtype)).sum()
        return logits.div_(2)

    for seed in range(2):
        _beside(way, reference, sharded, own, seed)
        _beside(lambda model, ids: model(ids).mul_(3), reference, sharded, own, seed)
    assert_same_gradients(reference, sharded)


def test_outputs_changed_in_place(pool):
    # FSDP2's hooks hang on the tensors that leave; those of linears with a bias are views.
    pool.run(changed_in_place, world=2)


def cut_short() -> None:
    reference, sharded, own = _made(MESHES["dp_shard"])
    wrong: tuple[Callable[[Any], Any], ...] = (
        lambda m: m.head(torch.ones(2, 3)),
        lambda m: m(torch.ones(2, 3)),
        lambda m: m(inputs=torch.ones(2, 3, 5, dtype=torch.float64)),
        lambda m: m.model.layers[0](torch.ones(2, 3)),
        lambda m: m.model.layers[0].mlp(torch.ones(2, 3)),
    )
    for seed, call in enumerate(wrong):
        with pytest.raises((RuntimeError, TypeError)):
            call(sharded)
        _beside(lambda model, ids: model.head(model.model.embed(ids)), reference, sharded, own, seed)
        assert_same_gradients(reference, sharded)
        _beside(WAYS["by_hand"], reference, sharded, own, seed)
    assert_same_gradients(reference, sharded)


def test_after_a_call_that_failed(pool):
    pool.run(cut_short, world=2)


def another_torch() -> None:
    model = build()
    names = FSDPState.__init__

    def other(self: Any) -> None:
        names(self)
        self._training_state = None

    FSDPState.__init__ = other
    try:
        with pytest.raises(shardcore.NotSupportedError, match=r"keeps its state in another way .* wrap=False"):
            shardcore.shard(model, policy=TinyPolicy, tp=1, dp=2)
    finally:
        FSDPState.__init__ = names


def test_another_fsdp(pool):
    pool.run(another_torch, world=2)


def past_the_entry() -> None:
    reference, sharded = twins()
    ids = batch()
    for m in (reference, sharded):  # entered inside of what is called
        hidden = m.model.layers[0].forward(m.model.forward(ids))
        m.head.forward(hidden + m.model.layers[1].mlp(hidden)).square().mean().backward()
        m.forward(ids).square().mean().backward()
    assert_same_gradients(reference, sharded)
    layer, hidden = sharded.model.layers[0], hidden.detach().requires_grad_()
    calls: tuple[Callable[[Tensor], Tensor], ...] = (
        layer.attention.forward,
        layer.mlp.forward,
        lambda x: layer.mlp.gate(layer.norm2(sharded.model(inputs=x))),
    )
    for call in calls:
        with pytest.raises(
            shardcore.NotSupportedError, match=r"did not enter it.*layer\.mlp\(x\), not layer\.mlp\.forward"
        ):
            call(hidden)
        with torch.no_grad():
            call(hidden)
    assert layer.attention.q_proj(hidden.detach()).shape == (3, 8, 16)

    for m in (reference, sharded):  # something between the entry and its members
        m.zero_grad()
        m.model.layers[0].mlp.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
        m.model.layers[1].mlp.register_full_backward_hook(lambda *_: None)
        m(ids).square().mean().backward()
    assert_same_gradients(reference, sharded)


def test_calls_that_pass_the_entry_of_a_region_are_refused(pool):
    pool.run(past_the_entry, world=2)


def in_containers() -> None:
    for sizes in ({"tp": 2}, {"tp": 1, "dp": 2}):
        reference, sharded, _ = _made(sizes)
        containers = []
        for inner in (reference, sharded):
            head = torch.nn.Linear(97, 3).double()
            randomize(head)
            containers.append(torch.nn.Sequential(inner, torch.nn.Tanh(), head))
        optimizers = [torch.optim.AdamW(c.parameters(), lr=1e-3, foreach=False) for c in containers]
        for step in range(2):
            for seed in range(2):
                # Of a module of the user's own nobody averages the gradients over replicas: they see the same here.
                ids = batch(seed + 2 * step, rows=4)
                outs = [container(ids) for container in containers]
                assert_close(*outs, "output")
                for out in outs:
                    out.square().mean().backward()
            assert_same_gradients(reference, sharded)
            assert_close(containers[0][2].weight.grad, containers[1][2].weight.grad, "the plain head's gradient")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


def test_a_module_that_holds_a_sharded_model(pool):
    pool.run(in_containers, world=2)
