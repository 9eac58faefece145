"""A training that was saved goes on: bit for bit on the same mesh, with the same parameters on every other one."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fused_net import STEP_NAMES, make_sharded, ranks, train
from fused_net import whole as whole_of_net
from needs import FUSED
from tiny import build
from torch.distributed.fsdp import FSDPModule
from trainings import Training, draws, largest

import shardcore

_ALONE = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
_FOUR = {
    "tp 4": {"tp": 4},
    "tp 2 x dp_shard 2": {"tp": 2, "dp": 2, "enable_sequence_parallelism": False},
    "tp 2 x dp_replicate 2": {"tp": 2, "dp": 2, "dp_replicate_size": 2, "partial_gradients": "deferred"},
    "dp_shard 2 x dp_replicate 2": {"tp": 1, "dp": 4, "dp_replicate_size": 2},
    "unsharded": None,
}


def on_every_mesh(folder, meshes):
    """Save on each mesh and resume on the next two."""
    never_stopped = {name: Training(fields, steps=4).values() for name, fields in meshes.items()}
    for name, fields in meshes.items():
        Training(fields, steps=2, given=fields is not None).save(f"{folder}/{name}", step=2, extra=name)
    names = list(meshes)
    for at, further in itertools.product(range(len(names)), (1, 2)):
        saved, name = names[at], names[(at + further) % len(names)]
        fields = meshes[name]
        again = Training(fields, seed=7, steps=1)
        loaded = again.load(f"{folder}/{saved}")
        assert (loaded.path.name, loaded.step, loaded.extra) == ("step-2", 2, saved)
        assert largest(again.run([2, 3]).values(), never_stopped[name]) <= 1e-12, (saved, name)


@pytest.mark.nightly
def test_on_every_mesh_of_four(pool, tmp_path):
    # Vocabulary 97: uneven; 2 KV heads on 4 ranks: shared; HSDP cuts in two ways; the embedding is tied to the head.
    pool.run(on_every_mesh, str(tmp_path), _FOUR, world=4, timeout=120)


def same_mesh(folder, fields, dropout, seeded):
    options = {"dropout": dropout}
    first = Training(fields, **options)
    if seeded:  # a stream of the model's own, which torch's generator says nothing of
        shardcore.manual_seed(first.model, 3)
    first.run([0, 1])
    first.save(folder)
    wanted, drawn = first.run([2, 3]).values(), draws()
    again = Training(fields, seed=7, steps=3, **options)
    draws()
    again.load(folder)
    assert largest(again.run([2, 3]).values(), wanted) == 0
    assert draws() == drawn


@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"tp": 2},
        pytest.param({"tp": 1, "dp": 2}, marks=pytest.mark.nightly),
        pytest.param({"tp": 1, "dp": 2, "dp_replicate_size": 2}, marks=pytest.mark.nightly),
    ],
)
def test_bit_equal_on_the_same_mesh(pool, tmp_path, fields, seeded):
    pool.run(same_mesh, str(tmp_path), fields, 0.1, seeded)


@pytest.mark.parametrize("fields", [None, {"tp": 1}])
def test_without_a_process_group(tmp_path, fields):
    assert not dist.is_initialized()
    same_mesh(tmp_path, fields, 0.1, seeded=False)


def saved_on_two(folder):
    training = Training({"tp": 2, "dp": 1}, steps=2)
    training.save(folder)
    return training.run([2]).values()


def test_from_two_ranks_to_none(pool, tmp_path):
    wanted = pool.run(saved_on_two, str(tmp_path))[0]
    again = Training(None, seed=7)
    again.load(tmp_path)
    assert largest(again.run([2]).values(), wanted) <= 1e-12


@_ALONE
def test_dcp_alone_reads_the_files(pool, tmp_path):
    wanted = pool.run(saved_values, str(tmp_path))[0]
    model = build(7, tied=True, kv_heads=2)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "step-0", no_dist=True)
    assert state["model"].keys() == {key for key in wanted if key in state["model"]}
    assert all(torch.equal(value, wanted[name]) for name, value in state["model"].items())


def saved_values(folder):
    training = Training({"tp": 2}, steps=1)
    training.save(folder)
    return training.values()


_NETS = {"one": None, "tp 2": (2,), "tp 4": (4,), "dp_shard 2 x tp 2": (2, 2), "dp_replicate 2 x tp 2": (2, 1, 2)}


def fused(folder, segments):
    """Weights of several segments, of which a rank holds several runs, between all meshes."""
    wanted, state = _net_values(*_trained(segments, None, 3)[:2])
    for name, shape in _NETS.items():
        if ranks(shape) in (1, 4):
            net, optimizer, _ = _trained(segments, shape, 2)
            shardcore.save_checkpoint(f"{folder}/{name}", net, optimizer)
            plain = {"model": make_sharded(segments, None)[0].state_dict()}
            if dist.get_rank() == 0:
                dcp.load(plain, checkpoint_id=f"{folder}/{name}/step-0", no_dist=True)
            values = _net_values(net, optimizer)[0]
            if dist.get_rank() == 0:
                assert all(torch.equal(value, plain["model"][key]) for key, value in values.items()), name
    four = [name for name, shape in _NETS.items() if ranks(shape) in (1, 4)]
    for saved, name in itertools.product(four, four):
        net, optimizer, part = make_sharded(segments, _NETS[name], seed=5)
        shardcore.load_checkpoint(f"{folder}/{saved}", net, optimizer)
        train(net, optimizer, [2], **part)
        got, moments = _net_values(net, optimizer)
        assert all((got[key] - wanted[key]).abs().max() <= 1e-12 for key in wanted), (saved, name)
        assert all((moments[key] - state[key]).abs().max() <= 1e-12 for key in state), (saved, name)


def _trained(segments, shape, steps):
    net, optimizer, part = make_sharded(segments, shape)
    train(net, optimizer, range(steps), **part)
    return net, optimizer, part


def _net_values(net, optimizer):
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    values = {name: whole_of_net(p).detach().clone() for name, p in net.named_parameters()}
    state = {
        f"{name}.{key}": whole_of_net(optimizer.state[p][key])
        for name, p in net.named_parameters()
        for key in STEP_NAMES
    }
    return values, state


@pytest.mark.nightly
@_ALONE
@FUSED
@pytest.mark.parametrize("segments", [2, 3])
def test_fused_weights(pool, tmp_path, segments):
    pool.run(fused, str(tmp_path), segments, world=4, timeout=120)
