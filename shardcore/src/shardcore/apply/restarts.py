"""A store for the ranks that are here now, where torchrun keeps one store for all its restarts.

After a restart that store still has what the ranks before have left in it, addresses above all: whoever reads one
before it is replaced waits for a process that is dead. So ranks agree on a prefix that nobody has used. Each brings a
name that it has made up; the first rank offers a prefix to the names that it sees, and another one whenever a name
changes. The prefix that all ranks have accepted is taken. Counts of restarts would not do: each host has its own.
"""

from __future__ import annotations

import datetime
import json
import secrets
import time
from collections.abc import Callable

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, and not in its __all__
from torch.distributed.distributed_c10d import PrefixStore, Store

from shardcore._env import TorchrunEnv
from shardcore.errors import MissingRanksError

__all__ = ["agreed_store", "store_of"]

_LIMIT = 1800  # seconds; torch's own for starting a process group
_PAUSES = 0.005, 0.5  # seconds between two looks into the store, at first and at most


def store_of(env: TorchrunEnv) -> Store:
    """Return the part of torchrun's store that belongs to the ranks of this start; all of them make the call.

    Raises:
        MissingRanksError: they did not all come within 30 minutes.
    """
    limit = datetime.timedelta(seconds=_LIMIT)
    shared = TCPStore(str(env.master_addr), int(env.master_port or 0), is_master=False, timeout=limit)
    return agreed_store(shared, env.rank, env.world_size, limit)


def agreed_store(shared: Store, rank: int, world_size: int, limit: datetime.timedelta) -> Store:
    """Return a part of ``shared`` that nobody has used, the same for all ranks that are making this call.

    Args:
        shared: has what earlier ranks of the same numbers have left.
        rank: of this process.
        world_size: the number of ranks.
        limit: how long to wait for the others.

    Raises:
        MissingRanksError: they did not all come.
    """
    store, own = PrefixStore("shardcore/start", shared), secrets.token_hex(8)
    store.set(f"here/{rank}", own)
    look = _Offering(store, world_size) if rank == 0 else _Accepting(store, rank, own)
    return PrefixStore(f"shardcore/{_until(look, limit, rank)}", shared)


def _until(look: Callable[[], str | None], limit: datetime.timedelta, rank: int) -> str:
    """Return what ``look`` finds, as soon as it finds something."""
    end, (pause, longest) = time.monotonic() + limit.total_seconds(), _PAUSES
    while (found := look()) is None:
        if time.monotonic() > end:
            raise MissingRanksError(
                f"rank {rank} has waited {limit.total_seconds():g} s for the other ranks to start; the output of "
                "torchrun on each host says what became of them"
            )
        time.sleep(pause)
        pause = min(2 * pause, longest)
    return found


class _Offering:
    """On the first rank: offers prefixes until all have accepted one."""

    def __init__(self, store: Store, world_size: int) -> None:
        self._store, self._keys = store, [f"here/{rank}" for rank in range(world_size)]
        self._names: list[str] = []
        self._prefix = ""

    def __call__(self) -> str | None:
        """Return the prefix that all ranks have accepted; None as long as there is none."""
        if not self._store.check(self._keys):
            return None
        names = [name.decode() for name in self._store.multi_get(self._keys)]
        if names != self._names:
            self._names, self._prefix = names, secrets.token_hex(8)
            self._store.set("offer", json.dumps({"prefix": self._prefix, "names": names}))
        if self._store.add(f"accepted/{self._prefix}", 0) < len(names) - 1:
            return None
        self._store.set(f"taken/{self._prefix}", "")
        return self._prefix


class _Accepting:
    """On the others: accepts what is offered to this process."""

    def __init__(self, store: Store, rank: int, own: str) -> None:
        self._store, self._rank, self._own = store, rank, own
        self._accepted = ""

    def __call__(self) -> str | None:
        """Return the prefix that all ranks have accepted; None as long as there is none."""
        if not self._store.check(["offer"]):
            return None
        offer = json.loads(self._store.get("offer"))
        if offer["names"][self._rank : self._rank + 1] != [self._own]:
            return None
        if offer["prefix"] != self._accepted:
            self._accepted = offer["prefix"]
            self._store.add(f"accepted/{self._accepted}", 1)
        return self._accepted if self._store.check([f"taken/{self._accepted}"]) else None
