"""The outermost module of a sharded model: what must not be done to it is refused here, with the way that works."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, NoReturn, Self

import torch
from torch import Tensor

from shardcore.errors import WrapError
from shardcore.nn.guard import StreamGuarded

__all__ = ["ShardedModel"]


class ShardedModel(StreamGuarded):
    """A sharded model: the user's object, with moves to another kind of device and DDP refused."""

    keeps_name: ClassVar[bool] = True

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:
        # The first thing that DistributedDataParallel reads from a module. It would later fail on DTensor parameters,
        # or, with torch's private transform, lose most of them silently.
        raise WrapError(
            "DistributedDataParallel cannot wrap a sharded model: its parameters are DTensors. Give shard() a data "
            "axis (shardcore.shard(model, tp=..., dp=...)), or call torch.distributed.fsdp.fully_shard on the blocks "
            "and on the model with the data-parallel mesh; both work on DTensor parameters."
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        wanted = fn(torch.empty(0, device=self._shard_context.device)).device.type
        have = self._shard_context.tp.device_type
        if wanted not in (have, "meta"):
            raise WrapError(
                f"a model sharded over ranks on {have!r} cannot be moved to {wanted!r}: its device mesh stays behind. "
                f"Move it before shard(); for {wanted!r} start the process group with the backend of that device "
                "(nccl for cuda) and shard() moves each part by itself. To get the weights elsewhere, save them with "
                "save_pretrained or torch.distributed.checkpoint."
            )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # untyped in torch
        return self
