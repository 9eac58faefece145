"""`ShardFormer`: models, groups and loaders by one configuration."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch.distributed as dist
from tiny import TinyPolicy, batch, build
from torch.distributed.device_mesh import init_device_mesh

from shardcore.config import ShardConfig
from shardcore.errors import AgreementError, ConfigError
from shardcore.mesh.context import context_of
from shardcore_loop import ShardedDataLoader
from shardcore_shardformer import ProcessGroupManager, ShardFormer
from shardcore_testing.parity import assert_same_gradients


def groups():
    former = ShardFormer(ShardConfig(tensor_parallel_size=2, dp_replicate_size=1, dp_shard_size=2))
    manager = former.init_distributed()
    assert manager is former.init_distributed() is former.pg_manager
    assert repr(manager) == "ProcessGroupManager(pp=1, dp_replicate=1, dp_shard=2, ep=1, cp=1, tp=2)"
    rank = dist.get_rank()
    assert dist.get_process_group_ranks(manager.get("tp")) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert dist.get_process_group_ranks(manager.get("dp")) == [rank % 2, rank % 2 + 2]
    assert (manager.size("tp"), manager.rank("tp"), manager.size("dp"), manager.rank("dp")) == (
        2,
        rank % 2,
        2,
        rank // 2,
    )
    with pytest.raises(ConfigError, match="the mesh has no axis 'xp'; its axes are pp, dp_replicate"):
        manager.get("xp")
    both = ShardFormer(ShardConfig(tensor_parallel_size=1, dp_replicate_size=2, dp_shard_size=2)).init_distributed()
    assert (both.size("dp"), both.rank("dp"), both.rank("dp_replicate")) == (4, rank, rank // 2)
    with pytest.raises(ConfigError, match="dp has two axes here"):
        both.get("dp")


def test_process_groups(pool):
    pool.run(groups, world=4)


def test_one_rank_alone_has_no_groups():
    former = ShardFormer(ShardConfig())
    manager = former.init_distributed()
    assert (manager.mesh, manager.size("tp"), manager.rank("dp"), manager.axes) == (None, 1, 0, ())
    with pytest.raises(ConfigError, match="this process runs alone; start it with torchrun"):
        manager.get("tp")
    options = {"batch_size": 3, "shuffle": True, "seed": 3, "drop_last": True, "collate_fn": tuple}
    numbers = range(20)
    assert list(former.shard_dataset(numbers, **options)) == list(ShardedDataLoader(numbers, **options))


def former_on_its_mesh():
    reference = build()
    former = ShardFormer(shard_config=ShardConfig(tensor_parallel_size=2, data_parallel_size=2))
    manager = former.init_distributed()
    sharded, shared = former.optimize(copy.deepcopy(reference), TinyPolicy)
    assert shared == []
    context = context_of(sharded)
    assert context.mesh is manager.mesh
    ids = batch(0, rows=4)
    own = ids[2 * context.replica : 2 * context.replica + 2]
    reference(ids, labels=ids.roll(1, 1)).backward()
    sharded(own, labels=own.roll(1, 1)).backward()
    assert_same_gradients(reference, sharded)
    loader = former.shard_dataset(range(8), batch_size=2)
    assert (loader.sampler.num_replicas, loader.sampler.rank) == (2, context.replica)
    with pytest.raises(AgreementError, match="differ in the loader's seed"):
        former.shard_dataset(range(8), seed=dist.get_rank())


def test_a_former_shards_on_the_mesh_it_made(pool):
    pool.run(former_on_its_mesh, world=4)


def groups_of_given_places():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    groups = ProcessGroupManager(mesh)
    for axis in ("dp", "dp_shard"):
        assert groups.get(axis) is mesh.get_group("dp")
        assert (groups.size(axis), groups.rank(axis)) == (2, mesh.get_local_rank("dp"))
    with pytest.raises(ConfigError, match="the mesh has no axis 'dp_replicate'; its axes are dp, tp"):
        groups.get("dp_replicate")
    former = ShardFormer(ShardConfig(tensor_parallel_process_group=mesh["tp"].get_group()))
    with pytest.raises(ConfigError, match=r"the 4 ranks are not all on this mesh \(2\)"):
        former.shard_dataset([1, 2, 3])


def test_groups_of_places_that_are_given(pool):
    pool.run(groups_of_given_places, world=4)


def asked_before_the_start():
    former = ShardFormer(ShardConfig(tensor_parallel_size=1))
    with mock.patch.object(dist, "is_initialized", return_value=False):
        assert former.init_distributed().size("dp") == 1
    assert former.shard_dataset([1, 2]).sampler.num_replicas == 2
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with pytest.raises(ConfigError, match="the mesh has no axis 'dp'; its axes are tp"):
        ShardFormer(ShardConfig(device_mesh=mesh)).init_distributed().get("dp")


def test_a_former_that_was_asked_before_the_process_group_was_started(pool):
    pool.run(asked_before_the_start, world=2)
