"""`save_checkpoint`: every rank writes its part, and all of it appears at once, or not at all."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult
from torch.optim import Optimizer

from shardcore.checkpoint import folders
from shardcore.checkpoint.dcp import Writer, entries_of, own_parts
from shardcore.checkpoint.ranks import RankGroup
from shardcore.checkpoint.snapshot import Snapshot, merged
from shardcore.errors import CheckpointError, ConfigError
from shardcore.mesh.context import unwrapped

_SAVES = "_shardcore_saves"  # on the model

#: What a rank tells the first one when it has written its part: what it wrote, each with its checksum; what is to be
#: known of the tensors of its stage, if it tells that; its snapshot, without tensors.
_Written: TypeAlias = tuple[list[tuple[WriteResult, str]], dict[str, Any], Snapshot]


def save_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    scheduler: Any = None,
    loader: Any = None,
    step: int | None = None,
    extra: Any = None,
    keep_last: int | None = None,
    asynchronous: bool = False,
) -> Path:
    """Write a training checkpoint, from which `load_checkpoint` resumes on any mesh.

    Called on every rank of the model, between two steps: gradients are not saved. Each rank writes its part into a new
    folder ``folder/step-N.tmp-ID``, which is renamed to ``folder/step-N`` when everything is on the disk: a process
    that is killed at any instant leaves the earlier checkpoints, and this one or none. Nothing is written into an
    existing one.

    The files are those of `torch.distributed.checkpoint`, which reads them alone: ``model.NAME`` and
    ``optimizer.state.NAME.KEY``, with the names of the unsharded model. What is not a tensor is JSON beside them.

    Args:
        folder: holds the checkpoints; every rank sees the same one.
        model: sharded or not.
        optimizer: of its parameters.
        scheduler: anything with ``state_dict`` and ``load_state_dict``, such as a learning-rate scheduler.
        loader: the same for data: of a `ShardedDataLoader` the position, which any number of replicas takes up; of any
            other, such as ``torchdata``'s, the state of each replica.
        step: the number of the checkpoint; by default the one after the newest.
        extra: numbers, texts, lists, tuples, dictionaries, small tensors; the first rank's is saved.
        keep_last: remove all but so many complete checkpoints, those of the smallest steps first, after this one is
            complete.
        asynchronous: return when the state is copied to the CPU, and write in the background. The next save and
            `wait_for_checkpoint` wait for it, and raise what went wrong; so does the end of the process.

    Returns:
        The folder of the checkpoint, ``folder/step-N``.

    Raises:
        CheckpointError: there is one of that step, something cannot be stored, or this rank cannot write.
        ConfigError: an argument is wrong.
        NotSupportedError: a tensor or the optimizer's state lies on the ranks in a way that cannot be described.
        AgreementError: another rank failed, or the ranks differ in what they save. No checkpoint was made.
        MissingRanksError: a rank did not come or is gone.
    """
    model = unwrapped(model)
    saves = Saves.of(model)
    saves.wait()
    ranks = RankGroup.of(model, "save_checkpoint")

    def take() -> Snapshot:
        _check_arguments(step, keep_last, asynchronous)
        return Snapshot.of(model, ranks, optimizer, scheduler, loader, extra)

    arguments = {"folder": str(folder), "step": step, "keep_last": keep_last, "asynchronous": asynchronous}
    snapshot = ranks.together(take, items=lambda taken: taken.items(arguments)).of_own_stage(ranks)
    claim = folders.Claim()
    staging, final = ranks.first(lambda: folders.begin(Path(folder), step, claim))
    save = _Save(snapshot, saves.apart(ranks) if asynchronous else ranks, staging, final, keep_last, claim)
    try:
        ranks.together(lambda: save.prepare(copies=asynchronous))
    except BaseException:
        save.discard()
        raise
    if asynchronous:
        saves.start(save)
    else:
        save.run(shown=ranks.is_first)
    return final


def wait_for_checkpoint(model: nn.Module) -> None:
    """Wait until the asynchronous save of ``model`` is complete; return at once if there is none.

    Called on every rank, at the latest before the process group is destroyed.

    Raises:
        ShardcoreError: what that save failed with; no checkpoint was made.
    """
    if (saves := unwrapped(model).__dict__.get(_SAVES)) is not None:
        saves.wait()


def _check_arguments(step: Any, keep_last: Any, asynchronous: Any) -> None:
    if step is not None and (type(step) is not int or step < 0):
        raise ConfigError(f"step= must be an integer from 0 on, or None for the next one, got {step!r}")
    if not isinstance(asynchronous, bool):
        raise ConfigError(f"asynchronous= must be True or False, got {asynchronous!r}")
    if keep_last is not None and (type(keep_last) is not int or keep_last < 1):
        raise ConfigError(f"keep_last= must be a positive integer or None (keep all), got {keep_last!r}")


class Saves:
    """What a model remembers of its saves: its ranks, and the save that is running."""

    def __init__(self) -> None:
        self._ranks: RankGroup | None = None  # of the thread
        self._world: Any = None  # the default process group that they are of
        self._running: Future[None] | None = None

    @classmethod
    def of(cls, model: nn.Module) -> Saves:
        """Return those of ``model``."""
        saves: Saves = model.__dict__.setdefault(_SAVES, cls())
        return saves

    def __reduce__(self) -> tuple[type[Saves], tuple[()]]:
        return Saves, ()

    def apart(self, ranks: RankGroup) -> RankGroup:
        """Return ``ranks`` with a group for the thread; every one of them makes the first call."""
        world = dist.group.WORLD if dist.is_initialized() else None
        if self._ranks is None or self._world is not world:
            self._ranks, self._world = ranks.apart(), world
        return self._ranks

    def start(self, save: _Save) -> None:
        """Run ``save`` in a thread, for which the end of the process waits."""
        thread = ThreadPoolExecutor(1, f"saving {save.final}")
        self._running = thread.submit(save.run_in_background)
        thread.shutdown(wait=False)  # after what it was given

    def wait(self) -> None:
        """Wait for the save that is running, and raise what it failed with."""
        if self._running is None:
            return
        failure = self._running.exception()
        self._running = None
        if failure is not None:
            failure.add_note("This was an asynchronous save; no checkpoint was made of it.")
            raise failure


@dataclass(slots=True, eq=False)
class _Save:
    """One save, from the folder ``staging`` that was made for it to its ``final`` name."""

    snapshot: Snapshot
    ranks: RankGroup
    staging: Path
    final: Path
    keep_last: int | None
    claim: folders.Claim
    parts: dict[MetadataIndex, Tensor] = field(default_factory=dict)

    def prepare(self, *, copies: bool) -> None:
        """Find out what this rank writes; with ``copies`` nothing that happens to the model later changes it."""
        if not self.staging.is_dir():
            raise CheckpointError(
                f"{self.staging}, which rank {self.ranks.ranks[0]} has made, cannot be seen on this rank; save to a "
                "folder that all hosts share"
            )
        parts = own_parts(self.snapshot.tensors, self.snapshot.first, self.ranks.own)
        self.parts = {index: part.to("cpu", copy=True) for index, part in parts.items()} if copies else parts

    def run(self, *, shown: bool) -> None:
        """Write this rank's part, and on the first rank complete the checkpoint once all have."""
        try:
            results = self.ranks.together(lambda: self._write(shown))
            tensors, first = self.snapshot.tensors, self.snapshot.first
            entries = entries_of(tensors, first)  # refuses on every rank what cannot be described
            told = entries if self.ranks.own == first else {}
            everybody = self.ranks.gathered((results, told, dataclasses.replace(self.snapshot, tensors={})))
            self.ranks.first(lambda: self._complete(everybody))
        except BaseException:
            self.discard()
            raise

    def run_in_background(self) -> None:
        """Do what `run` does, and log what it fails with at once: nobody may ask."""
        try:
            self.run(shown=False)
        except BaseException as error:
            logging.getLogger("shardcore").error("the checkpoint %s was not saved: %s", self.final, error)
            raise

    def discard(self) -> None:
        """Remove what was written, on the first rank; what cannot be removed is left to the next save."""
        if self.ranks.is_first:
            shutil.rmtree(self.staging, ignore_errors=True)
            self.claim.give_up()

    def _write(self, shown: bool) -> list[tuple[WriteResult, str]]:
        sizes = {key: tensor.size() for key, tensor in self.snapshot.tensors.items()}
        position = self.ranks.position
        with folders.telling(f"writing to {self.staging}"):
            folders.write_json(self.staging / f"rank-{position}.json", self.snapshot.own)
            return Writer(self.staging, self.final).write(self.parts, sizes, position, shown=shown)

    def _complete(self, written: list[_Written]) -> None:
        snapshots = [snapshot for _, _, snapshot in written]
        entries = {key: entry for _, told, _ in written for key, entry in told.items()}
        aliases = {alias: key for snapshot in snapshots for alias, key in snapshot.aliases.items()}
        metadata = Metadata(entries, planner_data={key: tuple(key.split(".", 1)) for key in (*entries, *aliases)})
        results: list[WriteResult] = []
        checksums: dict[str, dict[str, str]] = {}  # by file and place in it
        for result, checksum in (pair for pairs, _, _ in written for pair in pairs):
            results.append(result)
            checksums.setdefault(result.storage_data.relative_path, {})[str(result.storage_data.offset)] = checksum
        for alias, key in aliases.items():
            metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[key]
            results += [_renamed(result, alias) for result in results if result.index.fqn == key]
        with folders.telling(f"writing to {self.staging}"):
            Writer(self.staging, self.final).finish(metadata, [results])
        index = {
            "step": int(self.final.name.removeprefix("step-")),
            **merged(snapshots),
            "aliases": aliases,
            "replicas": [snapshot.own["replica"] for snapshot in snapshots],
            "loader is shared": len({json.dumps(snapshot.own["loader"]) for snapshot in snapshots}) == 1,
        }
        folders.complete(self.staging, self.final, index, checksums)
        folders.prune(self.final, self.keep_last)
        self.claim.give_up()


def _renamed(result: WriteResult, key: str) -> WriteResult:
    return dataclasses.replace(result, index=dataclasses.replace(result.index, fqn=key))
