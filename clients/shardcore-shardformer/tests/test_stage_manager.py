"""Where a rank is in a pipeline, and the configuration that follows from it."""

from __future__ import annotations

import copy

import pytest
import torch.distributed as dist
from needs import PIPELINES
from tiny import TinyPolicy, batch, build
from torch.distributed.device_mesh import init_device_mesh

from shardcore import shard
from shardcore.errors import ConfigError
from shardcore_shardformer import PipelineStageManager, ShardConfig


def places() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    manager = PipelineStageManager(mesh, num_layers_per_stage=[3, 1])
    rank = dist.get_rank()
    assert (manager.num_stages, manager.stage, manager.get_rank()) == (2, rank // 2, rank)
    assert (manager.is_first_stage(), manager.is_last_stage()) == (rank < 2, rank >= 2)
    assert manager.get_next_rank() == manager.get_prev_rank() == (rank + 2) % 4
    assert manager.get_process_group().size() == 2
    config = ShardConfig(pipeline_stage_manager=manager, num_microbatches=2)
    assert (config.device_mesh, config.pipeline_bounds) == (mesh, (0, 3, 4))
    assert ShardConfig.of(config, parallel_output=True).pipeline_bounds == (0, 3, 4)
    assert ShardConfig().pipeline_stage_manager is None
    assert (config.pipeline_stage_manager.num_layers_per_stage, config.pipeline_stage_manager.stage) == (
        (3, 1),
        rank // 2,
    )
    reference = build(layers=4)
    model = shard(copy.deepcopy(reference), config, policy=TinyPolicy)
    data = {"ids": batch(0), "labels": batch(1)}
    assert abs(float(model.train_step(data)) - float(reference(**data).detach())) <= 1e-12
    held = {name.split(".")[2] for name, _ in model.named_parameters() if ".layers." in name}
    assert held == ({"0", "1", "2"} if rank < 2 else {"3"})
    for fields in (
        {"device_mesh": init_device_mesh("cpu", (4, 1), mesh_dim_names=("pp", "tp"))},
        {"pipeline_bounds": (0, 2, 4)},
    ):
        with pytest.raises(ConfigError, match=f"pipeline_stage_manager=.* contradicts {next(iter(fields))}="):
            ShardConfig(pipeline_stage_manager=manager, **fields)
    for counts in ((3, 1, 2), (4, 0), ("3", "1")):
        with pytest.raises(ConfigError, match="a positive integer for each stage"):
            PipelineStageManager(mesh, num_layers_per_stage=counts)
    with pytest.raises(ConfigError, match="wants a DeviceMesh with an axis 'pp'"):
        PipelineStageManager(mesh["tp"])


@PIPELINES
def test_a_manager_is_a_place(pool):
    pool.run(places, world=4)


def test_only_managers():
    with pytest.raises(ConfigError, match="must be a PipelineStageManager or None"):
        ShardConfig(pipeline_stage_manager=object())
