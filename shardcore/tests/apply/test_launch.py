"""Starting the process group from torchrun's variables, and the seeds that come with it."""

from __future__ import annotations

import random
import types

import numpy as np
import pytest
import torch
import torch.distributed as dist

import shardcore
from shardcore._env import torchrun
from shardcore.apply import launch
from shardcore.apply.launch import device_index
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


@pytest.mark.parametrize(
    ("variables", "local"),
    [
        ({"LOCAL_RANK": "2", "SLURM_LOCALID": "0"}, 2),
        ({"SLURM_LOCALID": "1", "SLURM_PROCID": "5"}, 1),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_RANK": "5"}, 3),
        ({"MPI_LOCALRANKID": "1"}, 1),
        # A batch script on one task, which starts the processes itself.
        ({"SLURM_LOCALID": "0", "SLURM_PROCID": "0"}, 5 % 4),
        ({"SLURM_LOCALID": "0", "SLURM_PROCID": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}, 3),
        ({}, 5 % 4),
    ],
)
def test_each_process_of_a_machine_gets_a_device_of_its_own(monkeypatch, variables, local):
    known = ("LOCAL_RANK", "SLURM_LOCALID", "SLURM_PROCID", "MPI_LOCALRANKID", "PMI_RANK")
    for name in (*known, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", **variables}.items():
        monkeypatch.setenv(name, value)
    assert device_index(torchrun(), devices=4) == local


def test_the_backend_and_the_device_are_the_accelerators(monkeypatch):
    """On a machine with an accelerator, which this is not: what would be called, in which order."""
    calls = []
    device = types.SimpleNamespace(device_count=lambda: 4, set_device=calls.append)
    monkeypatch.setattr(launch, "accelerator", lambda: "xpu")
    monkeypatch.setattr(torch, "get_device_module", lambda kind: device if kind == "xpu" else None)
    monkeypatch.setattr(dist, "init_process_group", calls.append)
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    launch._start(None)
    launch._start("gloo")
    launch._start("cpu:gloo,xpu:xccl")
    assert calls == [1, "xccl", "gloo", 1, "cpu:gloo,xpu:xccl"]
