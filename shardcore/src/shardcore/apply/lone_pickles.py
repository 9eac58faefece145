"""A state dict of a sharded model that one rank alone pickles: ``torch.save(model.state_dict(), ...)`` if rank is 0.

Its tensors have whole shapes and this rank's part of the numbers. A file of each rank is right, one file for all is
not; which of the two is meant shows when the other ranks pickle theirs too, or do not.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import os
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import Store

from shardcore.errors import ShardcoreWarning

__all__ = ["tell_of_lone_pickles"]

_SOON = 10.0  # seconds in which the others are expected to pickle theirs; nobody waits for it
_POLL = 0.1
#: Folders of code whose lines tell a user little.
_LIBRARIES = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], Path(torch.__file__).parent))


def tell_of_lone_pickles(model: nn.Module, ranks: tuple[int, ...]) -> None:
    """Warn when a state dict of ``model`` is pickled on one of the ``ranks``, which share its parameters, alone.

    Every state dict has the versions of the modules beside the tensors, which are pickled with it: they notice. What
    keeps the tensors alone, such as ``dict(model.state_dict())``, goes by unseen.
    """

    def hook(module: nn.Module, state: Any, prefix: str, metadata: Mapping[str, Any]) -> None:
        if hasattr(state, "_metadata"):
            state._metadata = _Versions(state._metadata, ranks)

    if len(ranks) > 1:
        model.register_state_dict_post_hook(hook)


class _Versions(OrderedDict[str, Any]):
    """The versions of modules, which are pickled as any `OrderedDict` is."""

    def __init__(self, versions: Mapping[str, Any], ranks: tuple[int, ...]) -> None:
        super().__init__(versions)
        self.ranks = ranks

    def __reduce_ex__(self, protocol: Any) -> Any:
        _ask(self.ranks)
        return OrderedDict(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Versions:
        return _Versions(copy.deepcopy(dict(self), memo), self.ranks)


def _ask(ranks: tuple[int, ...]) -> None:
    """Let a thread look whether the other ranks pickle theirs too; a process does not end before it has looked."""
    if not dist.is_initialized():
        return  # they cannot be asked any more
    store = dist.distributed_c10d._get_default_store()
    base = f"shardcore/pickled/{hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]}"
    count = store.add(f"{base}/{dist.get_rank()}", 1)
    look = functools.partial(_look, store, base, ranks, dist.get_rank(), count, _place())
    threading.Thread(target=look, name="shardcore-pickled").start()


def _place() -> tuple[str, int]:
    """Return the file and the line that pickle: neither torch's nor ours."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def _look(store: Store, base: str, ranks: tuple[int, ...], own: int, count: int, place: tuple[str, int]) -> None:
    end = time.monotonic() + _SOON
    missing = list(ranks)
    while missing and time.monotonic() < end:
        time.sleep(_POLL)
        try:
            missing = [rank for rank in missing if store.add(f"{base}/{rank}", 0) < count]
        except RuntimeError:  # the store has ended with the job
            return
    if missing:
        warnings.warn_explicit(
            f"a state dict that was pickled holds the parts of rank {own} under whole shapes, and the ranks with the "
            f"other parts have not pickled theirs (within {_SOON:g} s; ranks: {', '.join(map(str, missing))}): no "
            "model can be loaded from this alone. On every rank, call model.save_pretrained(folder) or "
            "torch.distributed.checkpoint.save; or get_model_state_dict(model, options=StateDictOptions("
            "full_state_dict=True)) of torch.distributed.checkpoint.state_dict, whose result one rank may save; or "
            "write a file of each rank",
            ShardcoreWarning,
            *place,
        )
