"""The ranks that save or load one model together: what one does for all, and one error on all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from shardcore._private import SAVING, require
from shardcore.agree.agreement import Report, agree
from shardcore.agree.fingerprint import Item
from shardcore.agree.store_barrier import StoreBarrier
from shardcore.errors import MissingRanksError, ShardcoreError
from shardcore.mesh.axes import DATA_AXES, axis_name, host_group
from shardcore.mesh.context import context_of

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, eq=False)
class RankGroup:
    """All ranks of a model."""

    ranks: tuple[int, ...]  # global ones, in the order of the mesh; the first decides where one does
    #: Of gloo, so that no device and no limit of its collectives is concerned; None if there is only one rank.
    group: ProcessGroup | None

    @classmethod
    def of(cls, model: nn.Module, call: str) -> RankGroup:
        """Find the ranks of ``model``, those of its mesh or of the default process group, and wait until all are here.

        Raises:
            MissingRanksError: some did not make the ``call``; the ranks that did say which.
        """
        if not dist.is_initialized():
            return cls((0,), None)
        context = context_of(model)
        ranks = tuple(range(dist.get_world_size()))
        # On a mesh without a data axis the caller may have arranged replicas: then all ranks hold the model.
        if context is not None and any(axis_name(context.mesh, axis) for axis in DATA_AXES):
            ranks = tuple(map(int, context.mesh.mesh.flatten()))
        if len(ranks) == 1:
            return cls(ranks, None)
        require(SAVING)
        with _naming_the_lost():
            # Before anything is sent, which others would take for something else.
            StoreBarrier.wait(ranks, {}, call)
            return cls(ranks, host_group(ranks))

    def apart(self) -> RankGroup:
        """Return the same ranks with a group of their own, for another thread; all of them make the call."""
        if self.group is None:
            return self
        with _naming_the_lost():
            return RankGroup(self.ranks, host_group(self.ranks, shared=False))

    @property
    def own(self) -> int:
        """This process's global rank."""
        return dist.get_rank() if self.group is not None else self.ranks[0]

    @property
    def position(self) -> int:
        """This process's place among the ranks."""
        return self.ranks.index(self.own)

    @property
    def is_first(self) -> bool:
        """Whether this rank does what is done once."""
        return self.own == self.ranks[0]

    def together(
        self,
        work: Callable[[], Value],
        *,
        items: Callable[[Value], Iterable[Item]] = lambda _: (),
        changing: bool = False,
    ) -> Value:
        """Do ``work``, which sends nothing, on every rank; return its result here, or raise on all if one has failed.

        What ``items`` says of the result has to be equal on all ranks; with ``changing`` it changes the model.

        Raises:
            ShardcoreError: what ``work`` raised, where it did.
            AgreementError: it failed on another rank, or the ranks differ.
            MissingRanksError: a rank is gone.
        """
        if self.group is None:
            return work()
        report, failure = Report(), None
        try:
            value = work()
            report = Report(items=tuple(items(value)))
        except BaseException as error:  # what ends this process too: the other ranks wait for a report
            failure = error
        with _naming_the_lost(failure):
            agree(report, failure, changing=changing, group=self.group)
        return value

    def first(self, work: Callable[[], Value]) -> Value:
        """Do ``work`` on the first rank alone and return, on every rank, what it returned; raise as `together` does."""
        answer = [self.together(lambda: work() if self.is_first else None)]
        if self.group is not None:
            with _naming_the_lost():
                dist.broadcast_object_list(answer, self.ranks[0], group=self.group)
        found: Any = answer[0]
        return found  # type: ignore[no-any-return]  # of the first rank

    def gathered(self, value: Value) -> list[Value]:
        """Return on the first rank the values of all, in the order of `ranks`; on the others an empty list."""
        if self.group is None:
            return [value]
        found: list[Any] | None = [None] * len(self.ranks) if self.is_first else None
        with _naming_the_lost():
            dist.gather_object(value, found, self.ranks[0], group=self.group)
        return self._in_order(found) if found else []

    def shared(self, value: Value) -> list[Value]:
        """Return on every rank the values of all, in the order of `ranks`."""
        if self.group is None:
            return [value]
        found: list[Any] = [None] * len(self.ranks)
        with _naming_the_lost():
            dist.all_gather_object(found, value, group=self.group)
        return self._in_order(found)

    def _in_order(self, found: Sequence[Any]) -> list[Any]:
        values = dict(zip(sorted(self.ranks), found, strict=True))  # torch orders the ranks of a group by number
        return [values[rank] for rank in self.ranks]


@contextmanager
def _naming_the_lost(own: BaseException | None = None) -> Iterator[None]:
    """Turn an error of the process group, which is how a lost rank shows, into one that says so."""
    try:
        yield
    except RuntimeError as error:
        if error is own or isinstance(error, ShardcoreError):
            raise
        raise MissingRanksError(
            "a checkpoint is saved and loaded by all ranks of a model together, and at least one of them did not come "
            "or is gone. Checkpoints that were complete before are as they were; start the job again. Said by torch: "
            f"{error}"
        ) from error
