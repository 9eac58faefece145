"""All ranks of a model in one call, and one of them that the others follow.

They meet in the store of the process group, not in a collective, so that a rank which does not come is named instead of
waited for. The one that is followed, the *writer*, tells its progress there too, so that its failure reaches all; and
while it writes, however slowly, a thread of it counts in the store, so that one that was killed or stopped is noticed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, default_pg_timeout

from shardcore.errors import AgreementError, MissingRanksError
from shardcore.mesh.axes import time_limit

_POLL = 0.05  # seconds between two looks into the store, at most
_BEAT = 1.0  # seconds between two signs of life of the writer, at most
_FAREWELL = 30.0  # seconds that the writer waits for others to hear its last word, at most: one may have been killed


@dataclass(slots=True)
class StoreBarrier:
    """All ranks of a model in the same call."""

    store: Store
    name: str  # the prefix of its keys
    reports: dict[int, dict[str, Any]]  # what each global rank brought, in the order of the mesh
    others: int  # how many ranks follow the writer
    step: int = 0  # how often the writer has told the others to go on

    @classmethod
    def wait(
        cls,
        ranks: Sequence[int],
        report: Mapping[str, Any],
        call: str = "save_pretrained",
        patience: float | None = None,
        lost: str = "",
    ) -> StoreBarrier:
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
        patience = _timeout() if patience is None else patience
        begin = time.monotonic()
        end = begin + patience
        while True:
            name = f"{base}/{store.add(f'{base}/number', 0)}"
            missing, brought = _attend(store, base, name, ranks, json.dumps(report), end, call)
            if not missing:
                reports = {rank: json.loads(text) for rank, text in zip(ranks, brought, strict=True)}
                return cls(store, name, reports, len(ranks) - 1)
            if dist.get_rank() not in missing:
                ranks_lost, waited = ", ".join(map(str, missing)) or "another one", time.monotonic() - begin
                text = (lost or _LOST).format(
                    ranks=ranks_lost, call=call, all=len(ranks), waited=waited, limit=patience
                )
                raise MissingRanksError(text, missing)

    def proceed(self) -> None:
        """On the writer: tell the others to go on."""
        self.store.set(f"{self.name}/step{self.step}", "")
        self.step += 1

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """On the writer: give signs of life, and tell the others of the end, or of an error; returns when all know.

        Without torchrun the store ends with the process of the first rank, which may be the writer.
        """
        done = threading.Event()
        beat = threading.Thread(target=self._beat, args=(done,), daemon=True)
        beat.start()
        try:
            yield
        except BaseException as error:  # an interrupt too: the others wait
            self.store.set(f"{self.name}/step{self.step}", f"{type(error).__name__}: {error}")
            self.step += 1
            raise
        else:
            self.proceed()
        finally:
            done.set()
            beat.join()
            self._see_off()

    def _see_off(self) -> None:
        end = time.monotonic() + _FAREWELL
        # A store that is gone says so where it is used: here it would hide what the writer failed of.
        with contextlib.suppress(RuntimeError, OSError):
            while self.store.add(f"{self.name}/followed", 0) < self.step * self.others and time.monotonic() < end:
                time.sleep(_POLL / 10)

    def _beat(self, done: threading.Event) -> None:
        while not done.wait(_BEAT):
            try:
                self.store.add(f"{self.name}/beat", 1)
            except (RuntimeError, OSError):  # the store is gone; the call that saves finds out by itself
                return

    def follow(self, writer: int) -> None:
        """On the other ranks: wait until the ``writer`` has taken its next step.

        Raises:
            AgreementError: it failed.
            MissingRanksError: for as long as the timeout of the process group it gave no sign of life.
        """
        key = f"{self.name}/step{self.step}"
        patience, beats = _timeout(), -1
        while True:
            end = time.monotonic() + patience
            while not _wait(self.store, key, min(end, time.monotonic() + _BEAT)):
                known, beats = beats, self.store.add(f"{self.name}/beat", 0)
                if beats != known:
                    break
                if time.monotonic() > end:
                    raise MissingRanksError(_GONE.format(writer=writer, seconds=patience), (writer,))
            else:
                break
        self.step += 1
        error = self.store.get(key).decode()
        self.store.add(f"{self.name}/followed", 1)
        if error:
            raise AgreementError(f"rank {writer} failed to save the model. Its error: {error}")


_LOST = (
    "{call} has to be called by all {all} ranks of the model, and these did not come: {ranks} (this one has waited "
    "for {waited:.0f} s; the timeout of the process group is {limit:g} s). Nothing was written. Call it on every rank "
    "(outside any `if rank == 0`)."
)

_GONE = (
    "rank {writer}, which writes the model for all, has given no sign of life for {seconds:g} s (the timeout of the "
    "process group): it was killed or stopped, or cannot be reached. The folder holds the earlier checkpoint, or the "
    "new one; start the job again."
)


def _timeout() -> float:
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
        came = _wait(store, outcome, end)
    finally:
        if not came:
            _decide(store, base, name, [rank for rank in ranks if not store.check([f"{name}/{rank}"])])
    if not came and not _wait(store, outcome, time.monotonic() + _timeout()):
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


def _wait(store: Store, key: str, end: float) -> bool:
    """Tell whether ``key`` is there before the time ``end``; looks again and again, since a store blocks in waits."""
    pause = _POLL / 50
    while not store.check([key]):
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _POLL)
    return True
