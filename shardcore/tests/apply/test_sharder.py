"""Applying a plan: the Shardformer way of writing it, ties, wrappers, and one process alone."""

from __future__ import annotations

import copy
import gc
import io
import weakref

import pytest
import torch
import torch.distributed as dist
from plain import (
    ParallelMixer,
    PlainBlock,
    ShardformerStyle,
    assert_unchanged,
    kinds_of,
    plain,
    scaled_by_the_whole,
    train,
)
from tiny import TinyLM, TinyPolicy, batch, build, shard
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

import shardcore
from shardcore.apply.sharder import ModelSharder
from shardcore.config import ShardConfig
from shardcore.errors import (
    AgreementError,
    ConfigError,
    NotSupportedError,
    PlanError,
    WrapError,
)
from shardcore.nn import RowLinear
from shardcore.policy import Policy
from shardcore_testing.parity import assert_close, assert_same_gradients, assert_same_parameters


def shardformer_style():
    for order in (0, 1):
        reference = plain()
        twin = plain()
        before = twin(batch(vocab=13))
        sharded = copy.deepcopy(reference)
        config = ShardConfig(tensor_parallel_size=dist.get_world_size())
        policy = ShardformerStyle()
        sharder = ModelSharder(sharded, *((policy, config) if order == 0 else (config, policy)))
        assert sharder.shard() is sharded
        for seed in (0, 1):
            assert_close(train(reference, seed), train(sharded, seed), "output")
        assert_same_gradients(reference, sharded)
        assert all(isinstance(p, DTensor) and isinstance(p.grad, DTensor) for p in sharded.parameters())
        assert {n for n, _ in reference.named_parameters()} == {n for n, _ in sharded.named_parameters()}
        mixer = sharded.blocks[0].mixer
        assert isinstance(mixer, ParallelMixer)
        assert mixer.kwargs == {"note": [1, 2]}
        assert mixer.weight.placements == (Shard(0),)
        assert mixer.scale.placements == (Replicate(),)
        assert tuple(mixer.weight.shape) == (8, 8)
        assert sharded.blocks[0].gain.gain.placements == (Shard(0),)
        # H27: nothing about the classes has changed.
        assert torch.equal(before, twin(batch(vocab=13)))
        assert torch.equal(before, plain()(batch(vocab=13)))
        assert type(twin.blocks[0]) is PlainBlock
        assert PlainBlock.scaled is not scaled_by_the_whole

    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=True) for m in (reference, sharded)]
    for model, optimizer in zip((reference, sharded), optimizers, strict=True):
        nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
        optimizer.step()
    assert_same_parameters(reference, sharded)
    clone = copy.deepcopy(sharded)
    reference.zero_grad()
    clone.zero_grad()
    train(reference)
    train(clone)
    assert_same_gradients(reference, clone)


@pytest.mark.parametrize("world", [2, 4])
def test_a_policy_written_for_shardformer(pool, world):
    pool.run(shardformer_style, world=world)


def synchronized():
    model = build(seed=dist.get_rank())
    model.register_buffer("steps", torch.tensor(5 + dist.get_rank()))
    model.register_buffer("many", torch.tensor([[1.0], [2.0]]).mul(1 + dist.get_rank()).expand(2, 5000))
    reference = build(seed=1)
    for some, rank in ((model, dist.get_rank()), (reference, 1)):
        # One number that stands for all; and every other row of a tensor.
        some.model.norm.weight = nn.Parameter(torch.full((1,), 2.0 + rank, dtype=torch.float64).expand(32))
        some.head.weight = nn.Parameter(torch.stack([some.head.weight.data, torch.zeros(97, 32)], 1)[:, 0])
        assert not some.head.weight.is_contiguous()
    shardcore.shard(model, policy=TinyPolicy, tp=2, sync_from=1)
    assert_same_parameters(reference, model)
    assert model.steps.item() == 6
    assert model.many[:, 4999].tolist() == [2.0, 4.0]
    assert_close(reference(batch()), model(batch()), "output")


def test_weights_of_one_rank(pool):
    pool.run(synchronized, world=2)


def ties():
    """H15."""
    reference = build(tied=True)
    sharded = shard(copy.deepcopy(reference))
    assert sharded.head.weight is sharded.model.embed.weight
    assert len(list(sharded.parameters())) == len(list(reference.parameters()))
    # With the usual eps what has no true gradient (the bias of a key's norm) moves by rounding errors alone.
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-4) for m in (reference, sharded)]
    for seed in range(3):
        for model, optimizer in zip((reference, sharded), optimizers, strict=True):
            optimizer.zero_grad()
            model(batch(seed), labels=batch(seed)).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            if model is reference:
                wanted = norm
        assert_close(wanted, norm, "norm")
        assert_same_gradients(reference, sharded)
    assert_same_parameters(reference, sharded)
    assert sharded.head.weight is sharded.model.embed.weight
    assert set(reference.state_dict()) == set(sharded.state_dict())


def wrappers_and_moves():
    model = shard(build())
    for module in (model, nn.Sequential(model, nn.Linear(2, 2))):
        with pytest.raises(RuntimeError, match=r"DTensor|sharded (tensor|dimension)|sharding strategy"):  # torch's
            DistributedDataParallel(module)
    assert len(list(model.parameters())) == len(list(build().parameters())), "H42"
    before = {n: id(p) for n, p in model.named_parameters()}
    with pytest.raises(WrapError, match="a model sharded over ranks on 'cpu' cannot be moved to 'meta2'"):
        model._apply(lambda t: _Elsewhere())
    assert before == {n: id(p) for n, p in model.named_parameters()}
    with pytest.raises(WrapError, match="a sharded model cannot be pickled"):
        torch.save(model, io.BytesIO())
    shallow = copy.copy(model)
    assert shallow.model is model.model
    assert torch.equal(shallow(batch()), model(batch()))
    assert isinstance(model, TinyLM)
    assert type(model).__name__ == "TinyLM"


class _Elsewhere:
    class device:  # noqa: N801
        type = "meta2"


def dtypes():
    reference = build()
    sharded = shard(copy.deepcopy(reference))
    for move in (lambda m: m.float(), lambda m: m.to(torch.float64), lambda m: m.bfloat16(), lambda m: m.double()):
        move(reference)
        move(sharded)
        assert {p.dtype for p in sharded.parameters()} == {p.dtype for p in reference.parameters()}
        assert all(isinstance(p, DTensor) for p in sharded.parameters())
        tolerance = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 1e-1}[reference.head.weight.dtype]
        for model in (reference, sharded):
            model.zero_grad()
            model(batch(), labels=batch()).backward()
        assert_same_gradients(reference, sharded, tolerance)
    sharded.half()
    assert sharded.model.norm.weight.dtype == torch.float16


def meta_and_one_rank():
    with torch.device("meta"):
        model = TinyLM(build().config)
    shard(model)
    assert all(isinstance(p, DTensor) and p.is_meta for p in model.parameters())
    assert model.head.weight.to_local().shape == ((49, 32) if dist.get_rank() == 0 else (48, 32))
    assert isinstance(model.model.layers[0].mlp.down, RowLinear)


def meta_materializes():
    reference = build()
    with torch.device("meta"):
        model = TinyLM(reference.config).double()
    shard(model)
    model.to_empty(device="cpu")
    source = shard(copy.deepcopy(reference))
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), source.parameters(), strict=True):
            mine.copy_(theirs)
    assert_close(reference(batch()), model(batch()), "output")


def surroundings():
    wrappers_and_moves()
    dtypes()
    meta_and_one_rank()
    meta_materializes()


def test_ties_hold(pool):
    pool.run(ties, world=2)
    pool.run(ties, world=4)


class BodyPolicy(TinyPolicy):
    stages = None

    def module_policy(self):
        return {name: rules for name, rules in super().module_policy().items() if name != "TinyLM"}


def tied_outside():
    whole = build(tied=True)
    whole.model.config = whole.config
    before = [*whole.parameters()]
    for axes in ({"tp": 2}, {"tp": 1, "dp": 2}):
        with pytest.raises((NotSupportedError, AgreementError), match=r"embed.weight of Decoder is Linear.weight too"):
            shardcore.shard(whole.model, policy=BodyPolicy, **axes)
        assert all(a is b for a, b in zip(before, whole.parameters(), strict=True))
    whole.head.weight = nn.Parameter(whole.head.weight.detach().clone())
    shardcore.shard(whole.model, policy=BodyPolicy, tp=2)
    # Who holds a parameter, and is no module that somebody can call, is no tie.
    other = build(tied=True)
    body, body.config = other.model, other.config
    del other
    kept = [dict(body.named_parameters())]
    shardcore.shard(body, policy=BodyPolicy, tp=2)
    assert not isinstance(kept[0]["embed.weight"], DTensor)


def test_a_tie_to_something_outside_is_refused(pool):
    pool.run(tied_outside, world=2)


def test_wrappers_moves_and_meta(pool):
    pool.run(surroundings, world=2)


def test_wrong_arguments():
    with pytest.raises(
        ConfigError, match="ModelSharder wants a model, a Policy and a ShardConfig, got int and NoneType"
    ):
        ModelSharder(nn.Linear(2, 2), 3)


def test_one_process_changes_nothing():
    model = build()
    kinds, values = kinds_of(model), copy.deepcopy(model.state_dict())
    assert shardcore.shard(model, policy=TinyPolicy, tp=1) is model
    assert ModelSharder(model, TinyPolicy()).shard() is model
    assert_unchanged(model, kinds, values)
    with pytest.raises(PlanError):
        shardcore.shard(nn.Linear(2, 2), policy=ShardformerStyleForNothing, tp=1)


class ShardformerStyleForNothing(Policy):
    def module_policy(self):
        return {}


def classes_made_anew():
    alive = []
    for _ in range(10):
        model = build()
        model.__class__ = type("Made", (TinyLM,), {"forward": TinyLM.forward})
        for layer in model.model.layers:
            layer.norm1.__class__ = type("MadeNorm", (nn.LayerNorm,), {})
        alive += [weakref.ref(type(model)), weakref.ref(type(model.model.layers[0].norm1))]
        shard(model)(batch()).sum().backward()
        del model, layer
    gc.collect()
    return sum(reference() is not None for reference in alive)


def test_classes_made_anew_are_freed(pool):
    assert pool.run(classes_made_anew, world=2) == [0, 0]
