"""All ranks of a model in one call.

They meet in the store of the process group, not in a collective, so that a rank which does not come is named instead of
waited for.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, default_pg_timeout

from shardcore.errors import MissingRanksError
from shardcore.mesh.axes import time_limit

POLL = 0.05  # seconds between two looks into the store, at most


@dataclass(slots=True)
class StoreBarrier:
    """All ranks of a model in the same call."""

    store: Store
    name: str  # the prefix of its keys
    reports: dict[int, dict[str, Any]]  # what each global rank brought, in the order of the mesh

    @classmethod
    def wait(
        cls,
        ranks: Sequence[int],
        report: Mapping[str, Any],
        call: str = "save_pretrained",
        patience: float | None = None,
        lost: str = "",
    ) -> Self:
        """Wait until all ``ranks`` are here, in the same ``call``.

        They are waited for as long as a collective would wait, or for ``patience`` in seconds; ``lost`` is the error,
        if something else is to be said than that they did not come to save: ``{ranks}`` there are those.

        Barriers of the same ranks are numbered in the store. A number ends when all have come or, for all at once, when
        the first rank runs out of patience; whoever comes later meets under the next number.

        Raises:
            MissingRanksError: some ranks did not come.
        """
        store = dist.distributed_c10d._get_default_store()  # the only store that every process group has
        base = f"shardcore/{call}/{hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]}"
        patience = limit_of_waiting() if patience is None else patience
        begin = time.monotonic()
        end = begin + patience
        while True:
            name = f"{base}/{store.add(f'{base}/number', 0)}"
            missing, brought = _attend(store, base, name, ranks, json.dumps(report), end, call)
            if not missing:
                reports = {rank: json.loads(text) for rank, text in zip(ranks, brought, strict=True)}
                return cls(store, name, reports)
            if dist.get_rank() not in missing:
                ranks_lost, waited = ", ".join(map(str, missing)) or "another one", time.monotonic() - begin
                text = (lost or _LOST).format(
                    ranks=ranks_lost, call=call, all=len(ranks), waited=waited, limit=patience
                )
                raise MissingRanksError(text, missing)


_LOST = (
    "{call} has to be called by all {all} ranks of the model, and these did not come: {ranks} (this one has waited "
    "for {waited:.0f} s; the timeout of the process group is {limit:g} s). Nothing was written. Call it on every rank "
    "(outside any `if rank == 0`)."
)


def limit_of_waiting() -> float:
    """Return the timeout of the default process group, in seconds."""
    limit = time_limit()
    return default_pg_timeout.total_seconds() if limit is None else limit.total_seconds()


def _attend(
    store: Store, base: str, name: str, ranks: Sequence[int], report: str, end: float, call: str
) -> tuple[list[int], list[str]]:
    """Come to the barrier ``name`` and return who was missing when it was decided, or what all have brought."""
    outcome = f"{name}/outcome"
    store.set(f"{name}/{dist.get_rank()}", report)
    if store.add(f"{name}/count", 1) == len(ranks):
        # The last one reads for all, and what is the same is told once: many ranks may meet.
        brought = [store.get(f"{name}/{rank}").decode() for rank in ranks]
        if _decide(store, base, name, [], brought[:1] if len(set(brought)) == 1 else brought):
            # All are here, so that nobody is in the barrier before this one any more.
            _forget(store, f"{base}/{int(name.rpartition('/')[2]) - 1}", ranks)
    came = False
    try:
        came = wait_for(store, outcome, end)
    finally:
        if not came:
            _decide(store, base, name, [rank for rank in ranks if not store.check([f"{name}/{rank}"])])
    if not came and not wait_for(store, outcome, time.monotonic() + limit_of_waiting()):
        raise MissingRanksError(f"{call}: a rank was lost while the ranks met. Nothing was written.")
    absent, told = json.loads(store.get(outcome))
    return absent, told * len(ranks) if len(told) == 1 else told


def _decide(store: Store, base: str, name: str, missing: list[int], brought: Sequence[str] = ()) -> bool:
    """Say who was missing, or what they brought, unless another rank has; return whether this one did."""
    # The first rank to add decides for all. The number moves on before the outcome can be seen, so that whoever has
    # seen it does not come here again.
    if first := store.add(f"{name}/decided", 1) == 1:
        store.add(f"{base}/number", 1)
        store.set(f"{name}/outcome", json.dumps([missing, brought]))
    return first


def _forget(store: Store, name: str, ranks: Sequence[int]) -> None:
    """Remove what a barrier has left in the store, which is kept by one host for all."""
    for key in ("count", "decided", "outcome", "beat", "followed", *ranks):
        store.delete_key(f"{name}/{key}")
    step = 0
    while store.check([key := f"{name}/step{step}"]):  # a store of a file says that it has deleted what was not there
        store.delete_key(key)
        step += 1


def wait_for(store: Store, key: str, end: float) -> bool:
    """Tell whether ``key`` is there before the time ``end``; looks again and again, since a store blocks in waits."""
    pause = POLL / 50
    while not store.check([key]):
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, POLL)
    return True
