"""Checks of calls across ranks: what they were called with, what they were seeded with, and who pickles alone.

A state dict of a sharded model has whole shapes and this rank's part of the numbers. A file of each rank is right, one
file for all (``torch.save(model.state_dict(), ...)`` if rank is 0) is not; which of the two is meant shows when the
other ranks pickle theirs too, or do not.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import math
import os
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import Store

from shardcore.agree.agreement import is_alone
from shardcore.agree.fingerprint import checksum
from shardcore.agree.store_barrier import StoreBarrier
from shardcore.errors import AgreementError, ShardcoreWarning
from shardcore.mesh.axes import Sizes, axis_name, host_group
from shardcore.mesh.context import ShardContext
from shardcore.nn import VocabEmbedding
from shardcore.nn.same_inputs import ALIKE, KIND, Brought, compare_inputs

_LOST = (
    "this MODEL was called on some of the ranks that share it, and these did not come: {ranks}. Look for an error on "
    "them, and call the model on all of its ranks alike, outside of any `if rank == 0`."
)


def compare_calls(model: nn.Module, context: ShardContext, every: int) -> None:
    """Let ``model`` compare its inputs over its ``tp``: in its first calls and each ``every``-th, if that is not 0."""
    ranks = _ranks(context)
    tell_of_lone_pickles(model, _sharers(context) or ranks)
    if ranks and every:
        # A model around this one, or a loop of the user's, looks up embeddings by itself.
        parts = [module for module in model.modules() if isinstance(module, VocabEmbedding)]
        axes = "cp x tp" if context.sizes.cp > 1 else "tp"
        meet = functools.partial(_compared, ranks, f"{type(model).__name__} ({axes})")
        compare_inputs([model, *parts], every, checksum, meet)


def follow_seeds(context: ShardContext) -> None:
    """Let the random stream of a model follow torch's generator on the first of the ranks that share the model.

    Every rank of the mesh makes the call. In a pipeline each step gives the stream its seeds, and no call does.
    """
    if context.sizes.pp > 1:
        return
    context.random.seed_of = context.seed_of
    if ranks := _ranks(context):
        # Elsewhere than on a CPU a collective of hosts, which waits for no device.
        context.random.group = context.sharing_group if context.device.type == "cpu" else host_group(ranks)


def _sharers(context: ShardContext) -> tuple[int, ...]:
    """Return the ranks that FSDP2 has divided the parameters among, with all that share a replica with one of them."""
    mesh = context.parameters
    if Sizes.of(mesh).dp_shard == 1 or is_alone():
        return ()
    ranks, name = mesh.mesh, axis_name(mesh, "dp_replicate")
    if name is not None:
        axis, place = (mesh.mesh_dim_names or ()).index(name), mesh.get_coordinate() or ()
        ranks = ranks.select(axis, place[axis])
    return tuple(map(int, ranks.flatten()))


def _ranks(context: ShardContext) -> tuple[int, ...]:
    return () if is_alone(context.sharing_group) else context.sharers


def _compared(ranks: tuple[int, ...], model: str, brought: Brought) -> None:
    barrier = StoreBarrier.wait(ranks, {"brought": brought}, "call", lost=_LOST.replace("MODEL", model))
    first, *others = ranks
    for other in others:
        if told := _difference(*(barrier.reports[rank]["brought"] for rank in (first, other))):
            name, here, there = told
            if name == ALIKE:
                raise AgreementError(
                    f"ranks {first} and {other} share one {model} and have other values of the parameters that "
                    f"each of them has whole: {here} on rank {first}, and {there} on rank {other}. Something has "
                    "changed them on one rank alone: a step of an optimizer, or weights that were loaded or set there. "
                    "Do that on all ranks alike, and begin again from the last checkpoint: what was computed since is "
                    "of neither model"
                )
            if name == KIND:
                raise AgreementError(
                    f"ranks {first} and {other} share one {model} and need the same calls of it, but rank {first} "
                    f"makes {here}, and rank {other} {there}. Call the model on all of its ranks alike, outside of any "
                    "`if rank == 0`: also `generate`, pipelines and evaluations, of which one rank may use the result"
                )
            raise AgreementError(
                f"ranks {first} and {other} share one {model}, but were called with different inputs: {name} is "
                f"{here} on rank {first}, and {there} on rank {other}. Ranks that share a model need the same batch: "
                "divide data by replicas and not by ranks, for instance with a sampler that has "
                "num_replicas=context.sizes.replicas and rank=context.replica, where "
                "context = shardcore.mesh.context.context_of(model), or with shardcore_loop.ShardedDataLoader, and "
                "seed its shuffling alike on all ranks. The order of a set of texts differs between processes unless "
                "PYTHONHASHSEED is set. ShardConfig.check_inputs_every says how often this is looked at"
            )


def _difference(first: Brought, other: Brought) -> tuple[str, str, str] | None:
    """Return the first argument in which two ranks differ, and what it is on each."""
    there = {name: (what, check) for name, what, check in other}
    for name, what, check in first:
        their, checked = there.pop(name, ("not there", ""))
        if what != their:
            return name, what, their
        if isinstance(check, str) or isinstance(checked, str):
            if check != checked:
                return name, what, f"{their}, with other values further on"
        elif _are_apart(check, checked):
            here, other_sum = (f"{what} with the sum {numbers[0]:.9g}".strip() for numbers in (check, checked))
            return name, here, other_sum
    for name, (what, _) in there.items():
        return name, "not there", what
    return None


def _are_apart(here: Sequence[float], there: Sequence[float]) -> bool:
    """Tell whether sums and norms differ by more than the tolerance that comes with them.

    Infinities and NaN differ from all but themselves, however large a tolerance they make of the norm.
    """
    *numbers, tolerance = here
    most = tolerance * max(abs(here[1]), abs(there[1]))
    pairs = [(one, other, math.isfinite(one - other)) for one, other in zip(numbers, there, strict=False)]
    return any(abs(one - other) > most if finite else repr(one) != repr(other) for one, other, finite in pairs)


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
