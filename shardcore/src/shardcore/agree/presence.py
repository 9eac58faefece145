"""One rank of a sharded model that calls it alone gets an error in seconds, on whatever the others are busy with.

While a rank waits for the others, it asks in the store where they are, and a thread of theirs answers. Nobody asks as
long as calls come through, and nothing is sent in a call. Whoever is late may be late for good reasons (it loads data,
it compiles, somebody looks at it in a debugger), and is waited for; its place is told. It is an error where the others
*cannot* come: a rank that has ended, and one that itself waits for this one, in another collective or another call.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self

import torch.distributed as dist

from shardcore.agree.whereabouts import A_MODEL, Whereabouts
from shardcore.comm.channel import Watch
from shardcore.errors import MissingRanksError
from shardcore.mesh import ShardContext

__all__ = ["Presence", "before_meeting"]

_TICK = 1.0  # seconds between two looks into the store
_ASKS = 5.0  # seconds in a call after which a rank asks where the others are
_TELLS = 10.0  # seconds after which it tells people
_SURE = 3.0  # seconds that another one has stayed where it waits
_ALIKE = (
    "Call the model on all ranks that share it alike, outside of any `if rank == 0`: also `generate`, pipelines and "
    "evaluations, of which one rank may use the result, and what saves it, where one rank writes. If there is an error "
    "on another rank, that one comes first. Then start the job again."
)
_EACH = 16  # ranks that are asked in a second: what one asks, all answer


class Transport(Protocol):
    """What ranks send each other by, and counts alike; see `shardcore.comm.channel.Channel`."""

    sent: int
    watch: Watch | None


class Presence:
    """Where the ranks that share a model are; made by all of them together.

    Args:
        ranks: their global ranks.
        name: what tells these ranks of a model from others that are the same ranks.
        channel: what they send each other by in a call; None if they only meet outside of calls.
        model: its class, for messages.
        binding: whether each call needs all of them; else only those do in which something is sent.
    """

    def __init__(
        self, ranks: Sequence[int], name: str, channel: Transport | None, model: str, *, binding: bool = True
    ) -> None:
        self._channel, self._model, self._binding = channel, model, binding
        self._ranks = ranks
        self._rank = dist.get_rank()
        self._store = dist.distributed_c10d._get_default_store()
        key = hashlib.sha256(repr((tuple(ranks), name)).encode()).hexdigest()[:16]
        # Each rank counts for itself: what one of them made alone, before it failed, does not meet that of another.
        number = self._store.add(f"shardcore/presence/{key}/made/{self._rank}", 1)
        self._base = f"shardcore/presence/{key}/{number}"
        self._thread = threading.get_ident()  # in which the model was called the last time
        self._since: float | None = None  # when the call began that this rank is in
        self._waits = (0.0, 0.0)  # when it began to wait for the last time, and when it still did
        self._met = 0  # meetings of calls that this rank has come to
        self._asked = -1  # the last question that was heard
        self._asks_again = 0.0  # when this rank may ask the next time
        self._told = False
        self._at: tuple[Any, float] = ((), 0.0)  # where this rank was when it was asked first, and when that was
        self._failed: tuple[str, list[int]] | None = None
        self._done = threading.Event()
        self._watch = threading.Thread(
            target=_watch, args=(weakref.ref(self), self._done), name="shardcore-presence", daemon=True
        )
        self._watch.start()
        leaving = functools.partial(_at_exit, weakref.ref(self))
        atexit.register(leaving)
        weakref.finalize(self, atexit.unregister, leaving).atexit = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # of the same ranks

    @property
    def failed(self) -> bool:
        """Whether it is known that the ranks will not meet."""
        return self._failed is not None

    def enter(self) -> None:
        """Begin a call of the model.

        Raises:
            MissingRanksError: see `check`.
        """
        if self._binding and self._failed is not None:
            self.check()
        self._thread = threading.get_ident()
        self._since = time.monotonic()

    def leave(self) -> None:
        """End the call."""
        self._since, self._told = None, False

    def meet(self) -> None:
        """Count a meeting in the store, which this rank is about to come to."""
        self._met += 1

    def check(self, error: Exception | None = None) -> None:
        """Go on, unless it is known that the ranks will not meet; asked again and again by who waits.

        Args:
            error: what the collective has raised that this rank has waited in. Then others may have ended.

        Raises:
            MissingRanksError: one of them has ended, or waits for another one elsewhere.
        """
        if error is not None and self._failed is None:
            self._explain(error)
        now = time.monotonic()
        first, last = self._waits
        self._waits = (now if now - last > 2 * _TICK else first, now)
        if self._failed is not None:
            message, missing = self._failed
            raise MissingRanksError(message, missing)

    @property
    def goes_on(self) -> bool:
        """Whether the process group is there in which the ranks meet."""
        return dist.is_initialized() and dist.distributed_c10d._get_default_store() is self._store

    def _explain(self, error: Exception) -> None:
        """Say which rank has ended, if one says so within some seconds: its connections are closed first."""
        end = time.monotonic() + _SURE
        while time.monotonic() < end:
            try:
                gone = [r for r in self._ranks if self._store.check([f"{self._base}/left/{r}"])]
            except (RuntimeError, OSError):
                return  # and so is the store: nothing is known
            if gone:
                raise MissingRanksError(self._message(dict.fromkeys(gone, "has ended")), gone) from error
            time.sleep(0.1)

    def look(self) -> None:
        """In the thread: answer who asks, and ask if this rank waits."""
        now, since = time.monotonic(), self._since
        if since is None and now - self._waits[1] < 2 * _TICK:  # in a backward
            since = self._waits[0]
        waited = 0.0 if since is None else now - since
        asks = waited > _ASKS and self._failed is None and now > self._asks_again
        if asks:
            self._asks_again = now + _TICK * (len(self._ranks) // _EACH)
        asked = self._store.add(f"{self._base}/asked", int(asks))
        if asked == self._asked:
            return
        self._asked = asked
        self._tell()
        if self._failed is None and self._store.check([f"{self._base}/verdict"]):
            message, missing = json.loads(self._store.get(f"{self._base}/verdict"))
            self._failed = message, missing
        elif asks:
            self._judge(waited)

    def lose(self) -> None:
        """In the thread: the store is gone, and with it rank 0, which holds it unless torchrun does."""
        if self._failed is None and 0 in self._ranks:
            gone = "the store of the process group is gone: the rank that held it has ended"
            self._failed = f"{self._begin()}, and {gone}", [0]

    def _state(self) -> dict[str, Any]:
        where = Whereabouts.of(self._thread)
        sent = 0 if self._channel is None else self._channel.sent
        at = (where, sent, self._met, self._since)
        now = time.monotonic()
        if at != self._at[0]:
            self._at = at, now
        return {
            "place": where.place,
            "in": where.waits_in,
            "for": where.waits_for,
            "meeting": where.meeting,
            "ended": where.ended,
            "sent": sent,
            "met": self._met,
            "stays": now - self._at[1],
        }

    def _tell(self) -> None:
        self._store.set(f"{self._base}/at/{self._rank}", json.dumps(self._state()))

    def _judge(self, waited: float) -> None:
        own = self._state()
        certain: dict[int, str] = {}
        late: dict[int, str] = {}
        for rank in self._ranks:
            if rank == self._rank:
                continue
            if self._store.check([f"{self._base}/left/{rank}"]):
                certain[rank] = "has ended"
            elif self._store.check([f"{self._base}/at/{rank}"]):
                other = json.loads(self._store.get(f"{self._base}/at/{rank}"))
                parted = _are_apart(self._rank, own, rank, other)
                if other["sent"] >= own["sent"] and other["met"] >= own["met"] and not parted:
                    continue  # it has come as far as this one, and may be slow
                at = f"at {other['place']}" if other["place"] else "at an unknown place"
                elsewhere = other["in"] and self._rank in other["for"]
                past = other["met"] < own["met"] and other["sent"] > own["sent"]
                if other["ended"] and other["stays"] > _SURE:
                    certain[rank] = "has come to the end of its script"
                elif own["stays"] > _SURE and other["stays"] > _SURE and (elsewhere or past):
                    what = f"waits for this one in {other['in']}" if elsewhere else "is in another call of the model"
                    certain[rank] = f"{what} ({at})"
                else:
                    late[rank] = f"is {at}"
            else:
                late[rank] = "gives no sign of life"
        if certain:
            self._decide(certain)
        elif late and waited > _TELLS and not self._told:
            self._told = True
            names = "; ".join(f"rank {rank} {what}" for rank, what in late.items())
            logging.getLogger("shardcore").warning(
                "%s, and has waited %.0f s for others: %s. A sharded model has to be called on all of its ranks alike, "
                "outside of any `if rank == 0`",
                self._begin(),
                waited,
                names,
            )

    def _decide(self, certain: dict[int, str]) -> None:
        message = self._message(certain)
        # Of two that find out at the same time, both have their own words.
        self._store.set(f"{self._base}/verdict", json.dumps([message, sorted(certain)]))
        self._failed = message, sorted(certain)
        # The others look for it when they are asked, and may have heard the last question before it was there.
        self._asked = self._store.add(f"{self._base}/asked", 1)

    def _message(self, certain: Mapping[int, str]) -> str:
        names = "; ".join(f"rank {rank} {what}" for rank, what in certain.items())
        return f"{self._begin()}, and others will not come: {names}. {_ALIKE}"

    def _begin(self) -> str:
        ranks = ", ".join(map(str, self._ranks))
        where = Whereabouts.of(self._thread)
        at = f" (at {where.place})" if where.place else ""
        call = f"{where.waits_in} with" if where.meeting and where.waits_in != A_MODEL else "a call of"
        return f"rank {self._rank} is in {call} a {self._model} that ranks {ranks} share{at}"


def _are_apart(rank: int, own: Mapping[str, Any], other_rank: int, other: Mapping[str, Any]) -> bool:
    """Tell whether two ranks wait for each other in different meetings, to each of which both have to come."""
    apart = own["meeting"] and other["meeting"] and own["meeting"] != other["meeting"]
    return bool(apart) and other_rank in own["for"] and rank in other["for"]


def before_meeting(context: ShardContext | None) -> Callable[[], None] | None:
    """Say that this rank is about to meet all others of its model, as all of them will, outside of a call.

    Returns:
        what looks whether they will come, for `Meeting.hold`; None where nothing is known of them.
    """
    if context is None:
        return None
    found: list[Presence] = context.presences
    for presence in found:
        presence.meet()
    return functools.partial(_check, found) if found else None


def _check(presences: Sequence[Presence]) -> None:
    for presence in presences:
        presence.check()


def _watch(found: weakref.ref[Presence], done: threading.Event) -> None:
    while not done.wait(_TICK):
        presence = found()
        if presence is None:
            return
        try:
            presence.look()
        except (RuntimeError, OSError, ValueError):  # the store is gone, or the process group was destroyed
            presence.lose()
            return
        if not presence.goes_on:
            return
        del presence


def _at_exit(found: weakref.ref[Presence]) -> None:
    presence = found()
    if presence is None:
        return
    # A daemon thread that comes back from C++ after the interpreter is gone ends the process with an abort.
    presence._done.set()
    presence._watch.join(timeout=5)
    try:
        presence._store.set(f"{presence._base}/left/{presence._rank}", "")
    except (RuntimeError, OSError):
        return  # nobody is there to read it
