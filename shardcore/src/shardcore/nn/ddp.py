"""DistributedDataParallel around a module that has a sharded model somewhere in it.

DDP reads a property of the module that it is given first, by which a sharded model refuses it. Of a module that holds
one it reads nothing before it flattens parameters, and says "Cannot flatten unevenly sharded" then.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardcore.errors import WrapError
from shardcore.nn.root import ShardedModel

__all__ = ["refuse_ddp_around_sharded"]

_LOOKS = "_shardcore_looks"
_IGNORED = "_ddp_params_and_buffers_to_ignore"


def refuse_ddp_around_sharded() -> None:
    """Let DDP refuse modules that hold a sharded model, for the whole process; the first call acts."""
    native = DistributedDataParallel.__init__
    if hasattr(native, _LOOKS):
        return

    @functools.wraps(native)
    def looking(self: DistributedDataParallel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        _look(module)
        native(self, module, *args, **kwargs)

    setattr(looking, _LOOKS, True)
    DistributedDataParallel.__init__ = looking  # type: ignore[method-assign]


def _look(module: nn.Module) -> None:
    """Refuse a module with a sharded model inside of which DDP would take parameters.

    Raises:
        WrapError: there is one.
    """
    for path, part in module.named_modules():
        if part is not module and isinstance(part, ShardedModel):
            ignored = set(getattr(module, _IGNORED, ()))
            names = (f"{path}.{name}" for name, p in part.named_parameters() if isinstance(p, DTensor))
            if not ignored.issuperset(names):
                raise WrapError(
                    f"DistributedDataParallel cannot wrap a {type(module).__name__} that holds a sharded "
                    f"{type(part).__name__}: its parameters are DTensors, and each rank would get other batches. Where "
                    "a trainer does it, change one line: from shardcore.integrations.trainer import Trainer; for any "
                    "other class of trainers sharded(SentenceTransformerTrainer), sharded(CrossEncoderTrainer) and the "
                    "like from the same module; for Accelerate: from shardcore.integrations.accelerate import "
                    "Accelerator. In a loop of your own leave DDP out, and give shard() a data axis (dp=...)"
                )
