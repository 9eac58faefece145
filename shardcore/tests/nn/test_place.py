"""Sharding over a process group or a mesh that the caller made."""

from __future__ import annotations

import copy
import os

import pytest
import torch.distributed as dist
from tiny import TinyPolicy, batch, build
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardcore
from shardcore.config import ShardConfig
from shardcore.errors import AgreementError, ConfigError, NotSupportedError
from shardcore.mesh.context import context_of
from shardcore_testing.parity import assert_close, assert_same_gradients


def _same(reference, sharded, ids):
    wanted, got = reference(ids, labels=ids.roll(1, 1)), sharded(ids, labels=ids.roll(1, 1))
    assert_close(wanted, got, "loss")
    wanted.backward()
    got.backward()
    assert_same_gradients(reference, sharded)


def two_groups():
    """Two pairs of ranks, each with a model of its own and a call of its own."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    which = dist.get_rank() // 2
    reference = build(seed=which)
    sharded = shardcore.shard(copy.deepcopy(reference), policy=TinyPolicy, tensor_parallel_process_group=pairs[which])
    context = context_of(sharded)
    assert (context.size, context.rank, context.replica) == (2, dist.get_rank() % 2, 2 * which)
    assert context.group is pairs[which]
    _same(reference, sharded, batch(which))


def test_a_group_of_some_ranks(pool):
    pool.run(two_groups, world=4)


def one_group_fails():
    """A failure in one pair is an error on both of its ranks, and none on the other pair."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    rank = dist.get_rank()
    model = build(seed=1 if rank == 3 else 0)
    before = {name: p.clone() for name, p in model.named_parameters()}
    shard = {"policy": TinyPolicy, "tensor_parallel_process_group": pairs[rank // 2]}
    if rank < 2:
        shardcore.shard(model, **shard)
        assert context_of(model) is not None
        return
    with pytest.raises(AgreementError, match=r"ranks 2 and 3 differ in the values of .* on rank 2, .* on rank 3"):
        shardcore.shard(model, **shard)
    assert all((p == before[name]).all() for name, p in model.named_parameters())


def test_errors_stay_in_their_group(pool):
    pool.run(one_group_fails, world=4)


def sync_in_a_group():
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    rank = dist.get_rank()
    sharded = shardcore.shard(
        build(seed=rank), policy=TinyPolicy, tensor_parallel_process_group=pairs[rank // 2], sync_from=rank // 2 * 2 + 1
    )
    _same(build(seed=rank // 2 * 2 + 1), sharded, batch(0))


def test_weights_come_from_a_rank_of_the_group(pool):
    pool.run(sync_in_a_group, world=4)


def on_a_mesh(shape, names):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    reference = build()
    sharded = shardcore.shard(copy.deepcopy(reference), policy=TinyPolicy, device_mesh=mesh)
    context = context_of(sharded)
    assert context.mesh is mesh
    replicas = mesh.size() // mesh["tp"].size()
    ids = batch(0, rows=4)
    rows = 4 // replicas
    own = ids[rows * context.replica : rows * (context.replica + 1)]
    reference(ids, labels=ids.roll(1, 1)).backward()
    sharded(own, labels=own.roll(1, 1)).backward()
    assert_same_gradients(reference, sharded)


def test_a_mesh_of_the_caller(pool):
    pool.run(on_a_mesh, (2, 2), ("dp_shard", "tp"), world=4)
    pool.run(on_a_mesh, (2, 2), ("dp_replicate", "tp"), world=4)
    pool.run(on_a_mesh, (1, 1, 2), ("pp", "dp_shard", "tp"), world=2)


def on_the_commonest_mesh():
    """``("dp", "tp")``: the data axis shards, as shard(dp=2) does, under its own name everywhere."""
    on_a_mesh((2, 2), ("dp", "tp"))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    config = ShardConfig(device_mesh=mesh).resolve(4)
    assert (config.tensor_parallel_size, config.dp_shard_size, config.dp_replicate_size) == (2, 2, 1)
    assert config.data_parallel_size == 2
    twice = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "dp_shard", "tp"))
    with pytest.raises(ConfigError, match=r"has the axes \('dp', 'dp_shard', 'tp'\); wanted"):
        ShardConfig(device_mesh=twice)
    model = shardcore.shard(build(), policy=TinyPolicy, device_mesh=mesh, wrap=False)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"])  # the caller's own slice goes together with shardcore's parameters
    fully_shard(model, mesh=mesh["dp"])
    model(batch(0), labels=batch(0)).backward()


def test_a_mesh_of_dp_and_tp(pool):
    pool.run(on_the_commonest_mesh, world=4)


def on_part_of_the_world():
    """A mesh of a slice of the ranks, the others do something else."""
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "tp"))
    reference = build(seed=dist.get_rank() // 2)
    sharded = shardcore.shard(copy.deepcopy(reference), policy=TinyPolicy, device_mesh=whole["tp"])
    assert context_of(sharded).replica == dist.get_rank() // 2 * 2
    _same(reference, sharded, batch(dist.get_rank() // 2))


def test_a_slice_of_a_mesh(pool):
    pool.run(on_part_of_the_world, world=4)


def contradictions():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    pair = mesh["tp"].get_group()
    for fields, message in (
        ({"device_mesh": mesh, "tensor_parallel_size": 4}, "tensor_parallel_size is 4, but device_mesh says 2; leave"),
        ({"device_mesh": mesh, "data_parallel_size": 1}, "data_parallel_size is 1, but device_mesh says 2; leave the"),
        ({"device_mesh": mesh, "dp_replicate_size": 2}, "dp_replicate_size is 2, but device_mesh says 1; leave the"),
        (
            {"tensor_parallel_process_group": pair, "tensor_parallel_size": 4},
            "tensor_parallel_size is 4, but tensor_parallel_process_group says 2; leave the size None",
        ),
        (
            {"tensor_parallel_process_group": pair, "data_parallel_size": 2},
            "data_parallel_size is 2, but tensor_parallel_process_group says 1; leave the size None",
        ),
        ({"device_mesh": mesh, "tensor_parallel_process_group": pair}, "both say which ranks are tensor-parallel"),
        (
            {"device_mesh": init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))},
            r"device_mesh has the axes \('dp',\); wanted 'tp' and, before it.*leave it out, and say tp= and dp=",
        ),
        (
            {"device_mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp_shard"))},
            r"device_mesh has the axes \('tp', 'dp_shard'\); wanted 'tp' and, before it",
        ),
        ({"device_mesh": init_device_mesh("cpu", (4,))}, r"device_mesh has the axes \(unnamed\); wanted 'tp'"),
    ):
        with pytest.raises(ConfigError, match=message):
            ShardConfig(**fields)
    deep = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    with pytest.raises(NotSupportedError, match="axis 'cp', which is not supported"):
        ShardConfig(device_mesh=deep)
    deep = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
    with pytest.raises(ConfigError, match="has 2 ranks on an axis 'ep'; give a mesh without it"):
        ShardConfig(device_mesh=deep)
    outside = dist.new_group([0])
    if dist.get_rank():
        with pytest.raises(ConfigError, match="must be a process group that this rank belongs to, or None"):
            ShardConfig(tensor_parallel_process_group=outside)


def test_contradictions_with_a_mesh_or_a_group(pool):
    pool.run(contradictions, world=4)


def error_in_a_configuration():
    """What is wrong with the arguments is an error on the ranks of its group, and waits for no other."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    rank = dist.get_rank()
    mesh = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("dp_shard", "tp"))
    if rank < 2:
        places = [ShardConfig(tensor_parallel_process_group=pairs[0]), ShardConfig(device_mesh=mesh)]
        for config in places:
            for wrong in ((0, 1), (1,)):
                error = ConfigError if rank in wrong else AgreementError
                with pytest.raises(error, match=r"tensor_parallel_size is 3, but .* says 2; leave the size None"):
                    shardcore.shard(build(), config, policy=TinyPolicy, tp=3 if rank in wrong else 2)
    else:
        with pytest.raises(ConfigError, match=r"device_mesh does not hold this rank; only the ranks of a mesh shard"):
            ShardConfig(device_mesh=mesh)


def test_errors_in_a_configuration_stay_in_its_group(pool):
    pool.run(error_in_a_configuration, world=4)


def half_of_the_world():
    """A mesh of two axes over half of the ranks, which has no process group of its own.

    On a store of its own: torch names such a group by its ranks, and the pool's store keeps the addresses of an earlier
    group of that name, which was destroyed.
    """
    dist.init_process_group("gloo")
    whole = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("other", "dp_shard", "tp"))
    half = dist.get_rank() // 2
    if half:
        return
    reference = build()
    sharded = shardcore.shard(copy.deepcopy(reference), policy=TinyPolicy, device_mesh=whole["dp_shard", "tp"])
    assert context_of(sharded).replica == dist.get_rank() % 2
    _same(reference, sharded, batch(0))


def test_a_mesh_of_two_axes_over_half_of_the_ranks(pool):
    pool.run(half_of_the_world, world=4, process_group=False)


def models_that_share():
    """Shard models in one default group, then one in the next default group."""
    dist.init_process_group("gloo")
    first = shardcore.shard(build(), policy=TinyPolicy, tp=2, dp=2)
    groups = len(dist.distributed_c10d._world.pg_map)
    second = shardcore.shard(build(), policy=TinyPolicy, tp=2, dp=2)
    assert len(dist.distributed_c10d._world.pg_map) == groups  # each would cost four more, with their connections
    mesh = context_of(first).mesh
    assert context_of(second).mesh is mesh
    assert context_of(shardcore.shard(build(), policy=TinyPolicy, tp=4)).mesh is not mesh
    dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    dist.init_process_group("gloo")
    reference, third = build(), shardcore.shard(build(), policy=TinyPolicy, tp=2)
    assert context_of(third).mesh is not mesh
    _same(reference, third, batch())


def test_models_of_one_default_group_share_its_mesh(pool):
    pool.run(models_that_share, world=4, process_group=False)
