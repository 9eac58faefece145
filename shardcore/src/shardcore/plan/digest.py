"""Values of a plan as JSON data, the same in every process, and how switches that leave a choice were decided."""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


def to_data(value: Any) -> Any:
    """Return ``value`` as JSON data that is the same in every process.

    Classes become their qualified names, functions their qualified names and a hash of their source.
    """
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    if isinstance(value, tuple | list):
        return [to_data(item) for item in value]
    if isinstance(value, dict):
        return {str(key): to_data(value[key]) for key in sorted(value, key=str)}
    if dataclasses.is_dataclass(value):
        fields = {f.name: to_data(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"kind": type(value).__name__, **fields}
    if isinstance(value, functools.partial):
        return {"kind": "partial", "call": to_data((value.func, value.args, value.keywords))}
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(to_data(item), sort_keys=True) for item in value)
    if isinstance(value, enum.Enum | torch.dtype | torch.device):
        return str(value)
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), list(value.shape), None if value.is_meta else value.detach().cpu().tolist()]
    if callable(value):
        return _callable_data(value)
    # Any other value (a config object) is known by its type: addresses differ between processes.
    return to_data(type(value))


def _callable_data(value: Callable[..., Any]) -> str:
    function = inspect.unwrap(value)
    name = f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__qualname__)}"
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        code = getattr(function, "__code__", None)
        source = repr((code.co_code, code.co_consts, code.co_names)) if code else ""
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if _is_filled(cell)]
    captured = [cell for cell in cells if not inspect.isclass(cell) and cell is not function]
    source += json.dumps([to_data(captured), to_data(getattr(function, "__defaults__", None))], sort_keys=True)
    return f"{name}#{hashlib.sha256(source.encode()).hexdigest()[:16]}"


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # a function that refers to itself before it is bound
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How a switch that leaves a choice was decided: what was chosen, with the reason if something was left out."""

    switch: str
    outcome: str

    def __str__(self) -> str:
        return f"{self.switch}: {self.outcome}"
