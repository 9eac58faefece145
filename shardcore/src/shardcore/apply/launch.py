"""Starting the default process group from what torchrun or srun says."""

from __future__ import annotations

import atexit
import random
import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shardcore._env import TorchrunEnv, torchrun
from shardcore.apply.errors import tell_once
from shardcore.apply.restarts import store_of
from shardcore.config import ShardConfig
from shardcore.errors import ConfigError
from shardcore.mesh.axes import accelerator


def launch_from_torch(*, backend: str | None = None, seed: int = 1024) -> None:
    """Start the default process group from torchrun's or srun's variables and seed the generators, at a script's start.

    ```python
    shardcore.launch_from_torch()      # under: torchrun --nproc-per-node 2 train.py
    ```

    Under ``srun``, which sets none of torch's variables, ranks are its processes; they meet on the first host of the
    job step, at a port that follows from the job's number, unless ``MASTER_ADDR`` and ``MASTER_PORT`` say otherwise.

    `shardcore.shard` starts the process group by itself; this is for scripts that need it before, and for those that
    come from ColossalAI, whose function of the same name it follows. A process group that runs already is kept.

    Args:
        backend: of the process group; by default that of the accelerator (NCCL for CUDA), else gloo.
        seed: given to the generators of Python, numpy and torch, the same on every rank.

    Raises:
        ConfigError: the process was started neither by torchrun nor by srun, or nothing says where ranks meet.
    """
    if not dist.is_initialized():
        if (env := torchrun()) is None:
            raise ConfigError(
                "launch_from_torch() did not find both RANK and WORLD_SIZE in the environment; start the script with: "
                "torchrun --nproc-per-node 2 your_script.py (or with srun)"
            )
        _start(env, backend)
    tell_once()
    random.seed(seed)
    np.random.seed(seed % 2**32)  # the generator that users' code draws from
    torch.manual_seed(seed)


def start_process_group(config: ShardConfig) -> None:
    """Start the default process group for ``config``, unless it runs already or there is only one rank."""
    if not dist.is_initialized():
        if (env := torchrun()) is None:
            if (wanted := config.ranks) > 1:
                raise ConfigError(
                    f"sharding over {wanted} ranks needs that many processes, and this one was started alone. Start it "
                    f"with: torchrun --nproc-per-node {wanted} your_script.py (or call "
                    "torch.distributed.init_process_group first)"
                )
            return
        _start(env, None)
    tell_once()


def world_size(config: ShardConfig) -> int:
    """Return the number of ranks that shard by ``config``: those of its mesh or group, else those of the job."""
    if config.device_mesh is not None:
        return config.device_mesh.size()
    return dist.get_world_size(config.tensor_parallel_process_group) if dist.is_initialized() else 1


def _start(env: TorchrunEnv, backend: str | None) -> None:
    kind = accelerator()
    own = dist.get_default_backend_for_device(kind) if kind else "gloo"
    backend = backend or own
    meeting = _meeting(env)
    if kind and own in backend:
        device = torch.get_device_module(kind)
        device.set_device(device_index(env, device.device_count()))
    dist.init_process_group(backend, **meeting)
    atexit.register(_end)


def _end() -> None:
    """End the process group where a script did not: the threads of gloo may abort a process that has done its work.

    Not with NCCL, which may wait here for a rank that has failed, nor where this rank has failed.
    """
    if dist.is_initialized() and dist.get_backend() == "gloo" and not hasattr(sys, "last_value"):
        dist.destroy_process_group()


def _meeting(env: TorchrunEnv) -> dict[str, Any]:
    """Return what torch does not find in the environment by itself: who this is, and where ranks meet."""
    if env.exported and env.restarts_in_place:
        return {"store": store_of(env), "rank": env.rank, "world_size": env.world_size}
    if env.exported:
        return {}
    given = {"MASTER_ADDR": env.master_addr, "MASTER_PORT": env.master_port}
    if missing := [name for name, value in given.items() if value is None]:
        raise ConfigError(
            f"this is rank {env.rank} of {env.world_size}, and nothing says where the ranks meet; export "
            f"{' and '.join(missing)}: the host of rank 0, and a port that is free there, the same for all ranks. "
            "torchrun does that by itself"
        )
    host = f"[{env.master_addr}]" if ":" in str(env.master_addr) else env.master_addr
    return {"init_method": f"tcp://{host}:{env.master_port}", "rank": env.rank, "world_size": env.world_size}


def device_index(env: TorchrunEnv, devices: int) -> int:
    """Return this process's device on its machine; without LOCAL_RANK, ranks fill machine after machine."""
    if devices <= 1:
        return 0  # of one's own: launchers can show each process its device alone
    if env.local_rank is None:
        return env.rank % devices
    if env.local_rank >= devices:
        raise ConfigError(
            f"rank {env.rank} is process {env.local_rank} of its machine, counted from 0, and sees {devices} devices; "
            "start as many processes on each machine as it has devices"
        )
    return env.local_rank
