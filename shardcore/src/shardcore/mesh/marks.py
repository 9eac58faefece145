"""What a sharded model remembers of itself, on the module: its context, or that it was sharded over one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from shardcore.mesh.context import ShardContext

__all__ = [
    "Division",
    "context_of",
    "division_of",
    "is_alone",
    "nearest_context",
    "set_alone",
    "set_context",
    "set_division",
    "set_part_of",
    "unwrapped",
]

_CONTEXT = "_shardcore_context"
_ALONE = "_shardcore_alone"
_PART_OF = "_shardcore_part_of"
_DIVISION = "_shardcore_division"

# Where wrappers of torch keep the one module they wrap: torch.compile, checkpoint_wrapper, FSDP1.
_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside of wrappers that only call it, such as that of ``torch.compile(model)``."""
    while (inner := next((part for name in _WRAPPED if (part := model._modules.get(name))), None)) is not None:
        model = inner
    return model


def context_of(model: nn.Module) -> ShardContext | None:
    """Return the context of a model that was sharded, or None."""
    return model.__dict__.get(_CONTEXT)


def is_alone(model: nn.Module) -> bool:
    """Tell whether ``model`` was sharded over a single rank, which changes nothing."""
    return bool(model.__dict__.get(_ALONE))


def set_alone(model: nn.Module) -> None:
    """Mark ``model`` as sharded over a single rank."""
    model.__dict__[_ALONE] = True


def set_context(model: nn.Module, context: ShardContext) -> None:
    """Mark ``model`` as sharded in ``context``."""
    model.__dict__[_CONTEXT] = context


def nearest_context(model: nn.Module) -> ShardContext | None:
    """Return the context of a model that was sharded, or of the one of which ``model`` is a named part, or None."""
    return context_of(model) or model.__dict__.get(_PART_OF)


def set_part_of(part: nn.Module, context: ShardContext) -> None:
    """Mark ``part`` as a model inside of one that was sharded in ``context``."""
    part.__dict__[_PART_OF] = context


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """How a model was divided among the ranks of a pipeline, on one of them.

    Attributes:
        position: of this rank in the pipeline.
        names: all names in the state dict of the whole model.
        first_names: the first name of each parameter that has several in the whole model, by its other names: on
            several ranks it may be there once under each.
    """

    position: int
    names: frozenset[str]
    first_names: Mapping[str, str]


def division_of(model: nn.Module) -> Division | None:
    """Return how ``model`` was divided, or None."""
    return model.__dict__.get(_DIVISION)


def set_division(model: nn.Module, division: Division) -> None:
    """Mark ``model`` as this rank's part of a whole one."""
    model.__dict__[_DIVISION] = division
