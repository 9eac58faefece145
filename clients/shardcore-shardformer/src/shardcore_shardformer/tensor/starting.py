"""Starting the ranks of a script that starts its own processes."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from shardcore.apply.launch import launch_from_torch
from shardcore.errors import ConfigError
from shardcore.mesh.axes import device_type_of


def launch(
    config: Mapping[str, Any] | None = None,
    *,
    rank: int,
    world_size: int,
    host: str,
    port: int,
    backend: str = "nccl",
    local_rank: int | None = None,
    seed: int = 1024,
) -> None:
    """Start the default process group of ranks that nobody but the script has started, and seed the generators.

    After ColossalAI's ``launch``. Under torchrun or srun there is `shardcore.launch_from_torch`.

    Args:
        config: None or empty: what ColossalAI's configuration says is said to `shardcore.shard` here.
        rank: this process's number, from 0.
        world_size: how many processes there are.
        host: the name or address of rank 0's machine.
        port: a free port of it, the same for all ranks.
        backend: of the process group; ``"gloo"`` without accelerators.
        local_rank: this process's device on its machine; by default ranks fill machine after machine.
        seed: given to the generators of Python, numpy and torch, the same on every rank.

    Raises:
        ConfigError: ``config`` says something.
    """
    if config:
        raise ConfigError(
            f"launch(config=) got {', '.join(map(str, config))}; wanted {{}}: give shardcore.shard its options instead"
        )
    address = f"[{host}]" if ":" in host else host
    dist.init_process_group(backend, init_method=f"tcp://{address}:{port}", rank=rank, world_size=world_size)
    if (kind := device_type_of()) != "cpu":
        device = torch.get_device_module(kind)
        device.set_device(rank % device.device_count() if local_rank is None else local_rank)
    launch_from_torch(seed=seed)


def free_port() -> int:
    """Return a port of this machine that no process listens on now."""
    with socket.socket() as found:
        found.bind(("", 0))
        port: int = found.getsockname()[1]
    return port


def print_rank_0(message: object) -> None:
    """Print ``message`` on rank 0 of the default process group, or where there is none."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(message, flush=True)
