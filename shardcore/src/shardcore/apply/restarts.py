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

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, and not in its __all__
from torch.distributed.distributed_c10d import PrefixStore, Store

from shardcore._env import TorchrunEnv
from shardcore.errors import MissingRanksError

_LIMIT = 1800  # seconds; torch's own for starting a process group
_PAUSES = 0.005, 0.5  # seconds between two looks into the store, at first and at most


def store_of(env: TorchrunEnv) -> Store:
    """Return the part of torchrun's store that belongs to the ranks of this start; all of them make the call."""
    limit = datetime.timedelta(seconds=_LIMIT)
    shared = TCPStore(str(env.master_addr), int(env.master_port or 0), is_master=False, timeout=limit)
    return agreed_store(shared, env.rank, env.world_size, limit)


def agreed_store(shared: Store, rank: int, world_size: int, limit: datetime.timedelta) -> Store:
    """Return a part of ``shared`` that nobody has used, the same for all ranks that are making this call.

    In ``shared`` is what earlier ranks of the same numbers have left; ``limit`` is how long to wait for the others.
    """
    store, own = PrefixStore("shardcore/start", shared), secrets.token_hex(8)
    keys = [f"here/{other}" for other in range(world_size)]
    store.set(keys[rank], own)
    names: list[str] = []  # of the ranks that ``prefix`` is offered to, this one among them
    prefix = ""
    end, (pause, longest) = time.monotonic() + limit.total_seconds(), _PAUSES
    while not (prefix and store.check([f"taken/{prefix}"])):
        if time.monotonic() > end:
            raise MissingRanksError(
                f"rank {rank} has waited {limit.total_seconds():g} s for the other ranks to start; the output of "
                "torchrun on each host says what became of them"
            )
        if rank == 0 and store.check(keys):
            if (here := [name.decode() for name in store.multi_get(keys)]) != names:
                names, prefix = here, secrets.token_hex(8)
                store.set("offer", json.dumps([prefix, names]))
            if store.add(f"accepted/{prefix}", 0) == world_size - 1:
                store.set(f"taken/{prefix}", "")
                continue
        elif rank > 0 and store.check(["offer"]):
            offered, names = json.loads(store.get("offer"))
            if names[rank : rank + 1] == [own] and offered != prefix:
                prefix = offered
                store.add(f"accepted/{prefix}", 1)
        time.sleep(pause)
        pause = min(2 * pause, longest)
    return PrefixStore(f"shardcore/{prefix}", shared)
