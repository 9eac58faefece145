"""`DistributedDataParallel` around a module that holds a sharded model somewhere inside, as trainers put it there.

Around the sharded model itself it is refused by `ShardedModel`. Around another module it would send the first rank's
parts to all ranks, of which torch says in words about views or about a "sharding strategy".
"""

from __future__ import annotations

import functools

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from shardcore.errors import WrapError
from shardcore.mesh import context_of

__all__ = ["refuse_ddp"]


@functools.cache
def refuse_ddp() -> None:
    """Refuse `DistributedDataParallel` around what holds a sharded model, for the whole process."""
    register_module_module_registration_hook(_refuse)


def _refuse(parent: nn.Module, name: str, inside: nn.Module | None) -> None:
    """See a module that becomes the child of ``parent``; DDP takes the one that it wraps before anything is sent."""
    if not isinstance(parent, DistributedDataParallel) or inside is None or context_of(inside) is not None:
        return
    sharded = next((module for module in inside.modules() if context_of(module) is not None), None)
    if sharded is not None:
        raise WrapError(
            f"DistributedDataParallel cannot wrap a {type(inside).__name__} that holds a sharded "
            f"{type(sharded).__name__}: its parameters are DTensors, and each rank would get other batches. Where a "
            "trainer does it, change one line: from shardcore.integrations.trainer import Trainer; for any other class "
            "of trainers sharded(SentenceTransformerTrainer), sharded(CrossEncoderTrainer) and the like from the same "
            "module; for Accelerate: from shardcore.integrations.accelerate import Accelerator. In a loop of your own "
            "leave DDP out, and give shard() a data axis (dp=...)"
        )
