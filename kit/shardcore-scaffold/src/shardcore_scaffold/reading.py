"""Which numbers the forwards of a model read from their modules and configurations."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

#: Module -> attribute (``"num_heads"``, or ``"config.num_heads"``) -> the number that it has.
Numbers = dict[str, dict[str, int]]


@contextmanager
def reading(model: nn.Module) -> Iterator[Numbers]:
    """Note every whole number that a module reads from itself, or from its configuration, while this lasts."""
    found: Numbers = defaultdict(dict)
    classes = {module: type(module) for module in model.modules()}
    for path, module in model.named_modules():
        object.__setattr__(module, "__class__", _watched(type(module), found[path], ""))
    try:
        yield found
    finally:
        for module, cls in classes.items():
            object.__setattr__(module, "__class__", cls)


def _watched(cls: type[Any], found: dict[str, int], holder: str) -> type[Any]:
    get: Any = cls.__getattribute__

    def read(self: Any, name: str) -> Any:
        value = get(self, name)
        if type(value) is int and not name.startswith("_"):
            found[f"{holder}{name}"] = value
        elif name == "config" and not holder and hasattr(value, "__dict__"):
            value = copy.copy(value)
            value.__class__ = _watched(type(value), found, "config.")
        return value

    return type(cls.__name__, (cls,), {"__getattribute__": read, "__module__": cls.__module__})
