"""Where a rank is in a pipeline, and the configuration that follows from it."""

from __future__ import annotations

import copy

import pytest
import torch.distributed as dist
from needs import PIPELINES
from tiny import TinyPolicy, batch, build
from torch.distributed.device_mesh import init_device_mesh

from shardcore import PipelineGradientCheckpointConfig, PipelineStageManager, ShardConfig, shard
from shardcore.errors import ConfigError


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
    reference = build(layers=4)
    model = shard(copy.deepcopy(reference), config, policy=TinyPolicy)
    data = {"ids": batch(0), "labels": batch(1)}
    assert abs(float(model.train_step(data)) - float(reference(**data).detach())) <= 1e-12
    held = {name.split(".")[2] for name, _ in model.named_parameters() if ".layers." in name}
    assert held == ({"0", "1", "2"} if rank < 2 else {"3"})
    for fields in (
        {"device_mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))},
        {"pipeline_bounds": (0, 2, 4)},
    ):
        with pytest.raises(ConfigError, match="has another mesh, or other stages"):
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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "one of them"),
        ({"num_ckpt_layers": 1, "num_ckpt_layers_per_stage": [1]}, "got both"),
        ({"num_ckpt_layers_per_stage": [1, -1]}, "integers of at least 0"),
        ({"num_ckpt_layers_per_stage": [0.5]}, "integers of at least 0"),
        ({"num_ckpt_layers_per_stage": "12"}, "integers of at least 0"),
    ],
    ids=str,
)
def test_what_stages_recompute(arguments, said):
    with pytest.raises(ConfigError, match=said):
        PipelineGradientCheckpointConfig(**arguments)
    assert PipelineGradientCheckpointConfig(num_ckpt_layers_per_stage=[2, 0]).of_stages([2, 1]) == (2, 0)
    assert PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=0.5).blocks(4) == 2
