"""FSDP2 over a model that was sharded along tp: by `apply_data_parallel`, and by the user."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny import TinyPolicy, batch, build
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import shardcore
from shardcore.fsdp.phase import apply_data_parallel
from shardcore.mesh.context import context_of
from shardcore_testing.parity import assert_same_gradients


def _trained(reference, sharded, rows=4):
    context = context_of(sharded)
    per_rank = rows // 2
    own = slice(per_rank * context.replica, per_rank * (context.replica + 1))
    for seed in (0, 1):
        ids = batch(seed, rows=rows)
        reference(ids, labels=ids.roll(1, 1)).backward()
        sharded(ids[own], labels=ids[own].roll(1, 1)).backward()
    return sharded


def _made(**fields):
    reference = build()
    sharded = copy.deepcopy(reference)
    shardcore.shard(sharded, policy=TinyPolicy, tp=2, dp=2, wrap=False, **fields)
    assert not isinstance(sharded, FSDPModule)
    return reference, sharded, context_of(sharded)


def by_the_user():
    reference, sharded, context = _made(dp_replicate_size=2)
    for layer in sharded.model.layers:
        replicate(layer, mesh=context.mesh["dp_replicate"])
    replicate(sharded, mesh=context.mesh["dp_replicate"])
    assert_same_gradients(reference, _trained(reference, sharded))

    reference, sharded, context = _made()
    for layer in sharded.model.layers:
        for part in (layer.attention.q_proj, layer.mlp.gate, layer.mlp):
            fully_shard(part, mesh=context.mesh["dp_shard"])  # a member of a region: it misses the fast path
        fully_shard(layer, mesh=context.mesh["dp_shard"])
    fully_shard(sharded, mesh=context.mesh["dp_shard"])
    assert_same_gradients(reference, _trained(reference, sharded))


def by_the_core():
    for stages in (TinyPolicy.stages, None):
        reference, sharded, context = _made()
        apply_data_parallel(sharded, context, stages, reshard_after_forward=False)
        wrapped = [name for name, module in sharded.named_modules() if isinstance(module, FSDPModule)]
        assert wrapped == (["", "model.layers.0", "model.layers.1"] if stages else [""])
        assert_same_gradients(reference, _trained(reference, sharded))
        assert type(sharded).__name__.endswith("TinyLM")
    _, sharded, context = _made()
    apply_data_parallel(sharded, context, TinyPolicy.stages, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
    assert sharded(batch()).dtype == torch.float32


def ties_of_blocks():
    """Blocks that have parameters in common are in the unit of the model, and these stay one; others have their own."""
    for sizes in ({"tp": 2, "dp": 2}, {"tp": 1, "dp": 4}, {"tp": 2, "dp_replicate_size": 2}):
        reference = build(layers=3)
        first, _, last = reference.model.layers
        for name in ("gate", "up", "down"):
            getattr(last.mlp, name).weight = getattr(first.mlp, name).weight
        sharded = shardcore.shard(copy.deepcopy(reference), policy=TinyPolicy, **sizes)
        assert [n for n, m in sharded.named_modules() if isinstance(m, FSDPModule)] == ["", "model.layers.1"]
        context = context_of(sharded)
        rows = 4 // context.sizes.replicas
        own = slice(rows * context.replica, rows * (context.replica + 1))
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (reference, sharded)]
        for seed in range(2):
            ids = batch(seed, rows=4)
            reference(ids, labels=ids.roll(1, 1)).backward()
            sharded(ids[own], labels=ids[own].roll(1, 1)).backward()
            assert_same_gradients(reference, sharded)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


def nothing_to_do():
    sharded = build()
    shardcore.shard(sharded, policy=TinyPolicy, tp=2)
    assert not any(isinstance(m, FSDPModule) for m in sharded.modules())
    before = {n: type(m) for n, m in sharded.named_modules()}
    apply_data_parallel(sharded, context_of(sharded), TinyPolicy.stages)
    assert before == {n: type(m) for n, m in sharded.named_modules()}


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")  # so does nn.Linear
def test_wrapped_by_the_user(pool):
    pool.run(by_the_user, world=4)


def test_wrapped_by_the_core(pool):
    pool.run(by_the_core, world=4)


def test_blocks_that_are_tied(pool):
    pool.run(ties_of_blocks, world=4)


def test_without_a_data_axis_nothing_is_wrapped(pool):
    pool.run(nothing_to_do, world=2)
