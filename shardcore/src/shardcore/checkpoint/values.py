"""State that is not weights, as JSON: what dictionaries of schedulers, loaders and users hold, and nothing that runs.

JSON's own kinds are written as they are. Everything else is an object with one key that begins with ``$``, which names
the kind. What has no kind here is refused when it is saved, so that whatever was saved can be loaded.
"""

from __future__ import annotations

import base64
import collections
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardcore.comm.raw import as_bytes
from shardcore.errors import CheckpointError

_LIMIT = 1 << 24  # bytes of one tensor; what is larger belongs into a model's or an optimizer's state


def encoded(value: Any, where: str) -> Any:
    """Return ``value`` as what `json` can write; ``where`` names it in errors.

    Raises:
        CheckpointError: a part of it is of a kind that cannot be stored.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [encoded(part, f"{where}[{at}]") for at, part in enumerate(value)]
    if type(value) is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: encoded(part, f"{where}[{key!r}]") for key, part in value.items()}
    for kind, (cls, pack, _) in _KINDS.items():
        if type(value) is cls or (cls in (Tensor, np.generic) and isinstance(value, cls)):
            return {kind: pack(value, where)}
    raise CheckpointError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be stored as data; numbers, "
        "texts, lists, tuples, dictionaries, sets, tensors and arrays of them can. Nothing was written."
    )


def decoded(value: Any) -> Any:
    """Return what was given to `encoded`.

    Raises:
        CheckpointError: ``value`` was not made by it.
    """
    if isinstance(value, list):
        return [decoded(part) for part in value]
    if not isinstance(value, dict):
        return value
    kind = next(iter(value), "")
    if not kind.startswith("$"):
        return {key: decoded(part) for key, part in value.items()}
    try:
        return _KINDS[kind][2](value[kind])
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise CheckpointError(f"an entry of kind {kind!r} cannot be read: {type(error).__name__}: {error}") from error


def _pairs(value: Mapping[Any, Any], where: str) -> list[Any]:
    return [[encoded(key, f"a key of {where}"), encoded(part, f"{where}[{key!r}]")] for key, part in value.items()]


def _of_pairs(pairs: list[Any]) -> list[tuple[Any, Any]]:
    return [(decoded(key), decoded(part)) for key, part in pairs]


def _members(value: Any, where: str) -> list[Any]:
    return [encoded(part, f"{where}[{at}]") for at, part in enumerate(value)]


def _bytes(value: bytes, where: str) -> str:
    if len(value) > _LIMIT:
        raise CheckpointError(
            f"{where} has {len(value)} bytes, and {_LIMIT} can be stored beside a model; make it a buffer of the "
            "model, or write it yourself. Nothing was written."
        )
    return base64.b85encode(value).decode("ascii")


def _tensor(value: Tensor, where: str) -> list[Any]:
    if isinstance(value, DTensor) or value.is_meta or value.layout != torch.strided:
        raise CheckpointError(
            f"{where} is a {type(value).__name__} on {value.device} ({value.layout}); only plain tensors with values "
            "can be stored beside a model. Gather it with full_tensor(). Nothing was written."
        )
    data = value.detach().cpu().contiguous()
    raw = _bytes(as_bytes(data).numpy().tobytes(), where)
    return [str(value.dtype).removeprefix("torch."), list(value.shape), raw]


def _of_tensor(parts: list[Any]) -> Tensor:
    name, shape, raw = parts
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch.{name} is no dtype")
    data = bytearray(base64.b85decode(raw))
    # A copy, since bytes lie where no dtype expects its values: generators crash on a state that is not aligned.
    return torch.frombuffer(data, dtype=dtype).reshape(shape).clone() if data else torch.empty(shape, dtype=dtype)


def _array(value: Any, where: str) -> list[Any]:
    if value.dtype.kind not in "biufc":
        raise CheckpointError(f"{where} is an array of {value.dtype}; only numbers can be stored. Nothing was written.")
    return [value.dtype.str, list(value.shape), _bytes(value.tobytes(), where)]


def _of_array(parts: list[Any]) -> Any:
    dtype, shape, raw = parts
    return np.frombuffer(base64.b85decode(raw), dtype=np.dtype(dtype)).reshape(shape).copy()


# Mark -> the class, how it is written, and how it is read.
_KINDS: Mapping[str, tuple[type, Callable[[Any, str], Any], Callable[[Any], Any]]] = {
    "$tuple": (tuple, _members, lambda parts: tuple(decoded(part) for part in parts)),
    "$dict": (dict, _pairs, lambda pairs: dict(_of_pairs(pairs))),
    "$ordered": (collections.OrderedDict, _pairs, lambda pairs: collections.OrderedDict(_of_pairs(pairs))),
    "$counter": (collections.Counter, _pairs, lambda pairs: collections.Counter(dict(_of_pairs(pairs)))),
    "$defaultdict": (collections.defaultdict, _pairs, lambda pairs: dict(_of_pairs(pairs))),
    "$set": (set, _members, lambda parts: {decoded(part) for part in parts}),
    "$deque": (collections.deque, _members, lambda parts: collections.deque(decoded(part) for part in parts)),
    "$bytes": (bytes, _bytes, base64.b85decode),
    "$tensor": (Tensor, _tensor, _of_tensor),
    "$array": (np.ndarray, _array, _of_array),
    "$number": (np.generic, _array, lambda parts: _of_array(parts)[()]),
}
