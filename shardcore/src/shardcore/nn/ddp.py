"""DistributedDataParallel around a sharded model, or around a module that has one somewhere in it.

DDP would later fail on DTensor parameters ("Cannot flatten unevenly sharded"), or, with torch's private transform, lose
most of them silently. No module of its own is asked before.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardcore.errors import WrapError
from shardcore.nn.handlers import Undo
from shardcore.nn.libraries import ask
from shardcore.nn.living import is_living

__all__ = ["refuse_ddp_around_sharded"]

_IGNORED = "_ddp_params_and_buffers_to_ignore"


def refuse_ddp_around_sharded() -> Undo:
    """Let DDP refuse sharded models, and modules that hold one."""
    patched: Any = DistributedDataParallel
    native = patched.__init__

    @functools.wraps(native)
    def looking(self: DistributedDataParallel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        _look(module)
        native(self, module, *args, **kwargs)

    patched.__init__ = looking

    def undo() -> None:
        if patched.__init__ is looking:  # what somebody has put around it goes on finding nothing
            patched.__init__ = native

    return undo


def _look(module: nn.Module) -> None:
    """Refuse a module with a sharded model in it, or that is one, of which DDP would take parameters.

    Raises:
        WrapError: there is one.
    """
    for path, part in module.named_modules():
        if not is_living(part):
            continue
        if part is module:
            raise WrapError(
                "DistributedDataParallel cannot wrap a sharded model: its parameters are DTensors. Give shard() a data "
                "axis (shardcore.shard(model, tp=..., dp=...)), or call torch.distributed.fsdp.fully_shard on the "
                "blocks and on the model with the data-parallel mesh; both work on DTensor parameters."
            )
        ignored = set(getattr(module, _IGNORED, ()))
        names = (f"{path}.{name}" for name, p in part.named_parameters() if isinstance(p, DTensor))
        if not ignored.issuperset(names):
            instead = "".join(f"{words} " for words in ask("", "INSTEAD_OF_WRAPPING") or ())
            raise WrapError(
                f"DistributedDataParallel cannot wrap a {type(module).__name__} that holds a sharded "
                f"{type(part).__name__}: its parameters are DTensors, and each rank would get other batches. "
                f"{instead}In a loop of your own leave DDP out, and give shard() a data axis (dp=...)"
            )
