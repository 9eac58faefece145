"""What the core asks about PEFT (see `shardcore.clients`), and what the client for transformers does."""

from __future__ import annotations

import functools
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from shardcore.errors import ConfigError
from shardcore.nn.mixin import add_mixin
from shardcore.nn.process import Change
from shardcore_peft._models import ShardedPeft, adding, load_into, refuse_unplaced
from shardcore_peft._prompts import refuse_foreign_prompts
from shardcore_peft._saving import save_adapters
from shardcore_peft.attaching import attached_to
from shardcore_transformers.holders import let_save

__all__ = [
    "CHANGES",
    "INSTEAD_OF_CHANGING",
    "adding",
    "attached_to",
    "load_into",
    "needs_of_optimizer",
    "refuse_unplaced",
    "with_adapters",
]


def _save_adapters(model: Any, *rest: Any, **kwargs: Any) -> None:
    own = type(model)
    add_mixin(model, ShardedPeft)  # which knows the name of what FSDP2 has wrapped
    try:
        save_adapters(model, *rest, **kwargs)
    finally:
        model.__class__ = own


INSTEAD_OF_CHANGING = (
    "Adapters of PEFT are attached before shard(), as shard(get_peft_model(model, config)), or after it by "
    "shardcore_peft.get_peft_model(model, config), which takes what PEFT's own function takes."
)


def with_adapters(model: nn.Module, rank: int) -> nn.Module:
    """Return ``model``, on the meta device, with LoRA of a rank on all its linears and all else frozen.

    Raises:
        ConfigError: PEFT takes no such model.
    """
    try:
        inject_adapter_in_model(LoraConfig(r=rank, target_modules="all-linear"), model, low_cpu_mem_usage=True)
    except ValueError as error:
        raise ConfigError(f"adapters of all linears of a {type(model).__name__}: {error}") from error
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.itemsize < torch.float32.itemsize:
            parameter.data = parameter.data.float()  # as get_peft_model does
    return model


def needs_of_optimizer(optimizer: Any) -> tuple[str | None, str]:
    """Return which of `shardcore_loop` has to step an optimizer of PEFT, and the option that needs it."""
    return ("WholeTensors" if type(optimizer).__name__ == "LoraFAOptimizer" else None), ""


CHANGES: tuple[Change, ...] = (
    functools.partial(let_save, "peft.peft_model", "PeftModel", _save_adapters),
    functools.partial(refuse_foreign_prompts, INSTEAD_OF_CHANGING),
)
