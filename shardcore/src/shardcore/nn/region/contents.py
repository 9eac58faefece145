"""Looking for tensors inside of arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["needs_gradient"]


def needs_gradient(value: Any) -> str | None:
    """Say where in ``value`` a tensor needs a gradient: ``""`` for itself, ``"['scale'][0]"`` inside, None nowhere.

    Mappings, sequences, sets and dataclasses are searched at any depth. Other objects are not: a cache of keys and
    values holds the heads of its rank.
    """
    if isinstance(value, Tensor):
        return "" if value.requires_grad else None
    return _inside(value, ())


def _inside(value: Any, above: tuple[int, ...]) -> str | None:
    items = _items(value)
    if not items:
        return None
    if not torch.compiler.is_compiling():  # a graph with an identity in it serves one object
        if id(value) in above:  # a container that holds itself
            return None
        above = (*above, id(value))
    for name, item in items:
        if isinstance(item, Tensor):
            if item.requires_grad:
                return name
        elif (place := _inside(item, above)) is not None:
            return name + place
    return None


def _items(value: Any) -> Iterable[tuple[str, Any]]:
    if value is None or isinstance(value, str | int | float):
        return ()
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", item) for key, item in value.items()]
    if isinstance(value, tuple | list | set | frozenset):
        return [(f"[{index}]", item) for index, item in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f".{field.name}", getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    return ()
