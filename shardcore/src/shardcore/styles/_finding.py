"""What rules look for in a module (arguments, parameters, numbers), and how they are written in messages."""

from __future__ import annotations

import inspect
import re
from typing import Any

from torch import nn

from shardcore.nn.arguments import Argument
from shardcore.policy import HeadCounts, Heads, Scope


def argument_of(module: nn.Module, name: str | None) -> Argument | None:
    """Return an argument of ``module.forward`` (the first by default), or None."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in inspect.signature(module.forward).parameters.values() if p.kind in kinds]
    wanted = name or (names[0] if names else None)
    return Argument(wanted, names.index(wanted)) if wanted in names else None


def is_in(name: str, outer: str) -> bool:
    """Tell whether ``name`` is the module ``outer`` (``""`` is the model), or is below it."""
    return not outer or f"{name}.".startswith(f"{outer}.")


def is_parameter(module: nn.Module, owner: str, name: str) -> bool:
    """Tell whether ``name`` is a parameter that the submodule ``owner`` of ``module`` holds itself."""
    found = submodule(module, owner)
    return found is not None and found._parameters.get(name) is not None


def number_of(scope: Scope, name: str) -> int | None:
    """Return a number that the module holds (dots reach into submodules, and what one holds), or record a problem."""
    owner, _, short = name.rpartition(".")
    above, _, holder = owner.rpartition(".")
    held = getattr(submodule(scope.module, above), holder, None) if holder else None
    module = scope.find(owner) if held is None or isinstance(held, nn.Module) else held
    value = getattr(module, short, None)
    if isinstance(value, int):
        return value
    if module is not None:
        scope.problem(f"{type(module).__name__} has no number {short!r}", "correct the name", owner)
    return None


def heads_of(scope: Scope, name: str | Heads | None) -> HeadCounts | None:
    """Return the head counts of the policy, or those that ``name`` counts of one module; record what is wrong."""
    if not isinstance(name, str):
        return scope.heads if name is None else name.counts(scope.module, scope.ranks)
    count = number_of(scope, name)
    return None if count is None else HeadCounts(query=count, kv=count, ranks=scope.ranks)


def submodule(module: nn.Module, name: str) -> nn.Module | None:
    """Return the submodule ``name`` of ``module``, or None."""
    try:
        return module.get_submodule(dotted(name))
    except AttributeError:
        return None


def dotted(suffix: str) -> str:
    """Return ``layers[0].mlp``, as Shardformer's policies write it, as ``layers.0.mlp``."""
    if "[" not in suffix:
        return suffix.lstrip(".")
    return re.sub(r"\[(\d+)\]", r".\1", suffix).lstrip(".")


def written(word: str, *names: Any, **named: Any) -> str:
    """Return a call of ``word`` as it is written in a policy; named arguments that are None are left out."""
    parts = [repr(n) if isinstance(n, str) else str(n) for n in names]
    parts += [f"{key}={value!r}" for key, value in named.items() if value is not None]
    return f"{word}({', '.join(parts)})"


def joined(*names: str) -> str:
    """Return the name of what is below, each name being relative to the one before; ``""`` is that itself."""
    return ".".join(filter(None, names))


def names_of(names: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return one name, or several, as a tuple."""
    return (names,) if isinstance(names, str) else tuple(names)
