"""Sizes of a mesh, and a rank's place on its axes."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardcore import ConfigError, ShardContext
from shardcore.mesh.axes import AXES, Sizes, build_mesh


def test_sizes():
    sizes = Sizes(dp_shard=3, dp_replicate=2, tp=4)
    assert AXES == ("pp", "dp_replicate", "dp_shard", "ep", "cp", "tp")
    assert sizes.shape == (1, 2, 3, 1, 1, 4)
    assert sizes.replicas == 6
    assert sizes.ranks == 24


def places():
    context = ShardContext.of(build_mesh(Sizes(dp_shard=2, tp=2)))
    assert context.sizes == Sizes(dp_shard=2, tp=2)
    tp, data = context.axis("tp"), context.axis("dp_shard")
    assert (tp.size, tp.rank, tp.group) == (2, dist.get_rank() % 2, context.group)
    assert (data.size, data.rank) == (2, dist.get_rank() // 2)
    assert sorted(dist.get_process_group_ranks(data.group)) == [dist.get_rank() % 2, dist.get_rank() % 2 + 2]
    named = ShardContext.of(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    assert named.sizes == context.sizes
    assert named.axis("dp_shard").rank == data.rank
    with pytest.raises(ConfigError, match=r"the mesh has no axis 'cp'; its axes are dp, tp"):
        named.axis("cp")
    assert Sizes.of(init_device_mesh("cpu", (4,))) == Sizes(tp=4)


def test_places_on_axes(pool):
    pool.run(places, world=4)
