"""Evaluators of sentence-transformers on sharded models: all ranks embed what they are given in the same order."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shardcore_trainer._replicas import Replicas


@contextlib.contextmanager
def in_one_order(model: nn.Module, replicas: Replicas) -> Iterator[None]:
    """Let ``model`` encode sentences in the order of the first rank in here.

    Evaluators put sentences into a set, whose order differs between processes unless PYTHONHASHSEED is set.
    """
    if not hasattr(model, "encode"):
        yield
        return
    own = model.__dict__
    kept = {name: own[name] for name in ("encode",) if name in own}
    own["encode"] = _ordered(model.encode, replicas)  # type: ignore[arg-type]  # a method
    try:
        yield
    finally:
        del own["encode"]
        own.update(kept)


def _ordered(native: Callable[..., Any], replicas: Replicas) -> Callable[..., Any]:
    @functools.wraps(native)
    def encode(inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(inputs, list) or not all(isinstance(each, str) for each in inputs):
            return native(inputs, *args, **kwargs)
        first = replicas.first(lambda: inputs, "all")
        if inputs == first or sorted(inputs) != sorted(first):
            return native(inputs, *args, **kwargs)
        places: dict[str, list[int]] = {}
        for at, sentence in enumerate(first):
            places.setdefault(sentence, []).append(at)
        return _rows(native(first, *args, **kwargs), [places[sentence].pop() for sentence in inputs])

    return encode


def _rows(found: Any, at: list[int]) -> Any:
    """Return rows of embeddings: a tensor, an array, or a list."""
    if isinstance(found, Tensor):
        return found.index_select(0, torch.tensor(at, device=found.device))
    return [found[row] for row in at] if isinstance(found, list) else found[at]
