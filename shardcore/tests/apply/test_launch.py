"""Starting the process group from torchrun's variables, and the seeds that come with it."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
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


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    """Whatever starts the tests, they are started by nobody."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "MPI_", "PMI_", "TORCHELASTIC_"))]:
        monkeypatch.delenv(name)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "ENVIRONMENT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("given", [(), ("RANK",), ("WORLD_SIZE",)])
def test_without_torchrun(monkeypatch, given):
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
    torchrun_says = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    for name, value in torchrun_says.items():
        monkeypatch.setenv(name, value)
    launch._start(torchrun(), None)
    launch._start(torchrun(), "gloo")
    launch._start(torchrun(), "cpu:gloo,xpu:xccl")
    assert calls == [1, "xccl", "gloo", 1, "cpu:gloo,xpu:xccl"]


def srun(task, tasks=8, **more):
    """What srun sets for one of its processes, four on each of two hosts."""
    return {
        "SLURM_PROCID": str(task),
        "SLURM_LOCALID": str(task % 4),
        "SLURM_NTASKS": str(tasks),
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_NODELIST": "gpu[003-004]",
        **more,
    }


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        (srun(5), (5, 8, 1, "gpu003", 24711, False)),
        # Two processes of a job of eight, as a second step, on the second host.
        (
            srun(1, tasks=2, SLURM_NTASKS="8", SLURM_STEP_ID="1", SLURM_STEP_NODELIST="gpu004"),
            (1, 2, 1, "gpu004", 24718, False),
        ),
        # A launcher that sets less.
        ({"SLURM_PROCID": "3", "SLURM_LOCALID": "3", "SLURM_NTASKS": "4"}, (3, 4, 3, None, None, False)),
        # torch's own variables come first, one by one.
        (srun(5, MASTER_ADDR="head", MASTER_PORT="1"), (5, 8, 1, "head", 1, False)),
        (srun(5, WORLD_SIZE="16", RANK="12"), (12, 16, None, "gpu003", 24711, False)),
        (srun(5, WORLD_SIZE="8"), (5, 8, 1, "gpu003", 24711, False)),
        (
            srun(0, RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", MASTER_ADDR="h", MASTER_PORT="9"),
            (1, 2, 1, "h", 9, True),
        ),
    ],
)
def test_what_srun_says(monkeypatch, variables, wanted):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    env = torchrun()
    found = (env.rank, env.world_size, env.local_rank, env.master_addr, env.master_port, env.exported)
    assert found == wanted


def test_a_batch_script_is_no_rank(monkeypatch):
    for name, value in {**srun(0), "ENVIRONMENT": "BATCH"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS")
    assert torchrun() is None
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")  # of a step that the script has started
    assert torchrun() is not None


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("one", "one"),
        ("b,a", "b"),
        ("gpu-7.cluster.org,gpu-8.cluster.org", "gpu-7.cluster.org"),
        ("n[12,3-5],m", "n12"),
        ("rack[1-2]n[009-010]-ib,x", "rack1n009-ib"),
    ],
)
def test_the_first_host(monkeypatch, hosts, first):
    for name, value in srun(0, SLURM_STEP_NODELIST=hosts).items():
        monkeypatch.setenv(name, value)
    assert torchrun().master_addr == first


def test_a_list_of_hosts_that_cannot_be_read(monkeypatch):
    for name, value in srun(0, SLURM_STEP_NODELIST="[").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"list of hosts '\[' .* could not be read; export MASTER_ADDR, the name of"):
        torchrun()


def test_nothing_says_where_ranks_meet(monkeypatch):
    for name, value in {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "MASTER_ADDR": "a"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"rank 3 of 4, and nothing says where the ranks meet; export MASTER_PORT:"):
        shardcore.launch_from_torch()
    assert not dist.is_initialized()


def test_more_processes_than_devices(monkeypatch):
    for name, value in srun(7, SLURM_LOCALID="7").items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="rank 7 is process 7 of its machine, counted from 0, and sees 4 devices"):
        device_index(torchrun(), devices=4)
    assert device_index(torchrun(), devices=1) == 0  # srun --gpus-per-task=1 shows each process one


PROCESS = """
import os, shardcore, torch.distributed as dist
shardcore.launch_from_torch()
print(dist.get_rank(), dist.get_world_size(), flush=True)
dist.barrier()
os._exit(0)
"""


@pytest.mark.nightly
def test_processes_of_srun_find_each_other():
    """Two processes with nothing of torchrun in their environments."""
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS],
            env={**clean, **srun(task, tasks=2, SLURM_JOB_NODELIST="localhost"), "MASTER_PORT": str(port)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for task in range(2)
    ]
    try:
        assert [process.communicate(timeout=100)[0].split() for process in started] == [["0", "2"], ["1", "2"]]
    finally:
        for process in started:
            process.kill()


_SCRIPT = """
import atexit, sys
import torch.distributed as dist
import shardcore

atexit.register(lambda: print("left:", dist.is_initialized()))
shardcore.launch_from_torch()
assert dist.is_initialized()
if len(sys.argv) > 1:
    raise SystemError("mine")
"""


@pytest.mark.parametrize("fails", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_group_that_was_started_here_ends_with_the_script(monkeypatch, fails):
    """gloo's threads may abort a process that leaves it; whoever has failed waits for nobody."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    arguments = [sys.executable, "-c", _SCRIPT, *(["fails"] if fails else [])]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) is not fails, done.stderr
    assert f"left: {fails}" in done.stdout
