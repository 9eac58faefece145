"""Broadcasts of parameters by who takes a sharded model for one that each rank has a whole copy of.

`DistributedDataParallel` around a module that holds a sharded model somewhere inside does it, as the trainers of other
libraries make it. DTensor has no rule for it, and torch says so in words about a "sharding strategy".
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor

from shardcore._private import BROADCASTS, missing
from shardcore.errors import WrapError

__all__ = ["refuse_broadcasts"]


def refuse_broadcasts() -> None:
    """Say what to do instead of such a broadcast, for the whole process; the first call acts."""
    if not missing(BROADCASTS):
        handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
        handlers.setdefault(torch.ops.c10d.broadcast_.default, _refuse)


def _refuse(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    raise WrapError(
        "DTensors were broadcast, as DistributedDataParallel does it with a module that holds a sharded model. "
        "transformers' Trainer, those that derive from it, and Accelerate wrap a model so, and would give each rank "
        "other batches. Change one line: from shardcore.integrations.trainer import Trainer; for any other class "
        "sharded(SentenceTransformerTrainer), sharded(CrossEncoderTrainer) and the like from the same module; for "
        "Accelerate: from shardcore.integrations.accelerate import Accelerator. In a loop of your own leave DDP out, "
        "and give shard() a data axis (dp=...)"
    )
