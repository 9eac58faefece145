"""Starting the process group from torchrun's variables, and the seeds that come with it."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist

import shardcore
from shardcore.errors import ConfigError


@pytest.mark.parametrize("given", [(), ("RANK",), ("WORLD_SIZE",)])
def test_without_torchrun(monkeypatch, given):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name in given:
        monkeypatch.setenv(name, "0" if name == "RANK" else "1")
    with pytest.raises(ConfigError, match="did not find both RANK and WORLD_SIZE in the environment; start the script"):
        shardcore.launch_from_torch()
    assert not dist.is_initialized()


@pytest.mark.skipif(torch.cuda.is_available(), reason="NCCL would start")
@pytest.mark.filterwarnings("ignore:Attempted to get default timeout for nccl")
def test_nccl_without_a_gpu_is_an_error_of_torch(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises((RuntimeError, ValueError), match=r"NCCL built in|NCCL is only supported with GPUs"):
        shardcore.launch_from_torch(backend="nccl")


def seeds():
    group = dist.group.WORLD
    drawn = []
    for seed in (7, 7, 8):
        shardcore.launch_from_torch(seed=seed)
        drawn.append((random.random(), np.random.random(), float(torch.rand(()))))
    assert dist.group.WORLD is group
    assert drawn[0] == drawn[1]
    assert all(one != other for one, other in zip(drawn[0], drawn[2], strict=True))
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, drawn)
    assert everybody[0] == everybody[1]


def test_a_running_group_is_kept_and_all_generators_are_seeded(pool):
    pool.run(seeds, world=2)
