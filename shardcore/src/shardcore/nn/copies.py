"""Copies of models without their values, and views of an object that many modules hold, with values of one rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def meta_copy(model: nn.Module, dtype: torch.dtype | None = None) -> Any:
    """Return a copy of ``model`` on the meta device, with the same ties, its floating-point parameters in ``dtype``."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        to = dtype if parameter.is_floating_point() and dtype is not None else parameter.dtype
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta", to), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.to("meta")
    return copy.deepcopy(model, memo)


#: On the class of a view: the values that it shows in place of those of the object, by name.
VALUES = "_shardcore_values"


def with_value(whole: Any, name: str, value: Any) -> Any:
    """Return a view of ``whole`` in which the attribute ``name`` is ``value``.

    The view has the object's own ``__dict__``: what anybody sets on one of the two is seen on the other, and whatever
    is made of that dict, as a saved configuration is, has the values of the object. Its class is a subclass, with the
    same name, of the object's.
    """
    native = type(whole)
    values = {**getattr(native, VALUES, {}), name: value}
    if VALUES in vars(native):  # a view already
        native = native.__mro__[1]
    body: dict[str, Any] = {shown: property(_constant(kept)) for shown, kept in values.items()}
    body |= {VALUES: values, "__module__": native.__module__, "__qualname__": native.__qualname__}
    kind: Any = type(native)  # a library may have a metaclass of its own
    view = object.__new__(kind(native.__name__, (native,), body))
    object.__setattr__(view, "__dict__", whole.__dict__)
    return view


def _constant(value: Any) -> Callable[[Any], Any]:
    return lambda _: value
