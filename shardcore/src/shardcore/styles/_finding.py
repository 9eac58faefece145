"""What rules look for in a module: arguments, parameters, numbers."""

from __future__ import annotations

import inspect

from torch import nn

from shardcore.policy import Scope

__all__ = ["argument_of", "is_parameter", "number_of"]


def argument_of(module: nn.Module, name: str | None) -> tuple[str, int] | None:
    """Return name and position of an argument of ``module.forward`` (the first by default), or None."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in inspect.signature(module.forward).parameters.values() if p.kind in kinds]
    wanted = name or (names[0] if names else None)
    return (wanted, names.index(wanted)) if wanted in names else None


def is_parameter(module: nn.Module, owner: str, name: str) -> bool:
    """Tell whether ``name`` is a parameter that the submodule ``owner`` of ``module`` holds itself."""
    try:
        return module.get_submodule(owner)._parameters.get(name) is not None
    except AttributeError:
        return False


def number_of(scope: Scope, name: str) -> int | None:
    """Return a number that the module holds (dots reach into submodules), or record that it does not."""
    owner, _, short = name.rpartition(".")
    module = scope.find(owner)
    value = getattr(module, short, None)
    if isinstance(value, int):
        return value
    if module is not None:
        scope.problem(f"{type(module).__name__} has no number {short!r}", "correct the name", owner)
    return None
