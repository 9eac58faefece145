"""What can be sharded at all: an instance of a module that was not sharded before."""

from __future__ import annotations

import itertools

from torch import nn
from torch.distributed.tensor import DTensor

from shardcore.comm.dtensor_params import is_packed
from shardcore.errors import AlreadyShardedError, ConfigError, NotSupportedError
from shardcore.mesh.context import context_of
from shardcore.nn import ParallelMixin


def refuse_sharded(model: nn.Module) -> None:
    """Raise if ``model`` or a part of it was sharded before."""
    for name, module in model.named_modules():
        if isinstance(module, ParallelMixin) or context_of(module) is not None:
            place = f"its submodule {name!r}" if name else "it"
            raise AlreadyShardedError(
                f"this {type(model).__name__} cannot be sharded: {place} was sharded before. Build the model anew to "
                "shard it in another way."
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise AlreadyShardedError(
                f"this {type(model).__name__} cannot be sharded: its parameter {name!r} is a DTensor already, from "
                "an earlier shard(), fully_shard or distribute_tensor. Build the model anew and call shard() first."
            )


def refuse_packed(model: nn.Module) -> None:
    """Raise if ``model`` has tensors that are made of others, as quantization makes them, which cannot be cut."""
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        kind = type(tensor)
        if hasattr(kind, "__tensor_flatten__") and not is_packed(tensor):  # the protocol of tensors around tensors
            raise NotSupportedError(
                f"this {type(model).__name__} cannot be sharded: its tensor {name!r} is a {kind.__module__}."
                f"{kind.__qualname__}, whose values are packed (quantized, say) and cannot be divided among ranks. "
                "Shard the model as it was trained, in bfloat16 for example"
            )


def check_model(model: object) -> None:
    """Raise unless ``model`` is a module, and in no wrapper already."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ConfigError(
            f"the {type(model.module).__name__} is inside of a DistributedDataParallel, where a Trainer or "
            "accelerator.prepare may have put it. Shard it first, and give what shard() returns to them; shard() has "
            "data axes of its own (dp=)"
        )
    if isinstance(model, nn.Module):
        return
    got = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
    raise ConfigError(f"what is sharded is a model, an instance of a torch.nn.Module, got {got}; pass the model itself")
