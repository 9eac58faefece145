"""`save_checkpoint`: every rank writes its part, and all of it appears at once, or not at all."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.optim import Optimizer

from shardcore._progress import Progress
from shardcore.checkpoint import folders
from shardcore.checkpoint.chunks import Writing, entries_of, own_parts
from shardcore.checkpoint.ranks import Ranks
from shardcore.checkpoint.snapshot import Snapshot
from shardcore.checkpoint.stages import Stages
from shardcore.errors import CheckpointError, ConfigError
from shardcore.mesh import unwrapped

__all__ = ["Saves", "save_checkpoint", "wait_for_checkpoint"]

_SAVES = "_shardcore_saves"  # on the model


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
    ranks = Ranks.of(model, "save_checkpoint")

    def take() -> Snapshot:
        _check_arguments(step, keep_last, asynchronous)
        return Snapshot.of(model, ranks, optimizer, scheduler, loader, extra)

    arguments = {"folder": str(folder), "step": step, "keep_last": keep_last, "asynchronous": asynchronous}
    snapshot = ranks.together(take, items=lambda taken: taken.items(arguments))
    stages = Stages.of(model, ranks)
    ranks.together(lambda: stages.check(snapshot))
    claim = folders.Claim()
    staging, final = map(Path, ranks.first(lambda: tuple(map(str, folders.begin(Path(folder), step, claim)))))
    job = _Job(snapshot, saves.apart(ranks) if asynchronous else ranks, stages, staging, final, keep_last, claim)
    try:
        ranks.together(functools.partial(job.prepare, copies=asynchronous))
    except BaseException:
        job.discard()
        raise
    if asynchronous:
        saves.start(job)
    else:
        job.run(shown=ranks.is_first)
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
    folders.check_keep_last(keep_last)


class Saves:
    """What a model remembers of its saves: its ranks, and the save that is running."""

    def __init__(self) -> None:
        self._ranks: Ranks | None = None  # of the thread
        self._world: Any = None  # the default process group that they are of
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    @classmethod
    def of(cls, model: nn.Module) -> Saves:
        """Return those of ``model``."""
        saves: Saves = model.__dict__.setdefault(_SAVES, cls())
        return saves

    def __deepcopy__(self, memo: dict[int, Any]) -> Saves:
        return Saves()

    def __reduce__(self) -> tuple[type[Saves], tuple[()]]:
        return Saves, ()

    def apart(self, ranks: Ranks) -> Ranks:
        """Return ``ranks`` with a group for the thread; every one of them makes the first call."""
        world = dist.group.WORLD if dist.is_initialized() else None
        if self._ranks is None or self._world is not world:
            self._ranks, self._world = ranks.apart(), world
        return self._ranks

    def start(self, job: _Job) -> None:
        """Run ``job`` in a thread, for which the end of the process waits."""
        self._thread = threading.Thread(target=self._run, args=(job,), name=f"saving {job.final}")
        self._thread.start()

    def _run(self, job: _Job) -> None:
        try:
            job.run(shown=False)
        except BaseException as error:
            self._failure = error
            logging.getLogger("shardcore").error("the checkpoint %s was not saved: %s", job.final, error)

    def wait(self) -> None:
        """Wait for the save that is running, and raise what it failed with."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            failure.add_note("This was an asynchronous save; no checkpoint was made of it.")
            raise failure


class _Writer(FileSystemWriter):
    """DCP's writer, with the final name in the index instead of the folder that it writes to."""

    def __init__(self, staging: Path, final: Path) -> None:
        super().__init__(str(staging))
        self._final = final

    def storage_meta(self) -> StorageMeta:
        """Say of which checkpoint the files are."""
        return StorageMeta(checkpoint_id=self._final.name, save_id=self.save_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Brought:
    """What a rank tells the first one when it has written its part.

    Attributes:
        results: what it wrote.
        checksums: of what it wrote.
        replica: its replica.
        loader: stands for the state of its loader.
        entries: what is to be known of the tensors of its stage, if it tells that.
        snapshot: its snapshot, without tensors.
    """

    results: list[WriteResult]
    checksums: dict[MetadataIndex, str]
    replica: int
    loader: str
    entries: dict[str, Any]
    snapshot: Snapshot


class _Job:
    """One save, from the folder that was made for it to its name."""

    def __init__(
        self,
        snapshot: Snapshot,
        ranks: Ranks,
        stages: Stages,
        staging: Path,
        final: Path,
        keep_last: int | None,
        claim: folders.Claim,
    ) -> None:
        self._claim = claim
        self._snapshot, self._ranks, self._stages, self._keep_last = snapshot, ranks, stages, keep_last
        self._tensors = {key: tensor for key, tensor in snapshot.tensors.items() if key not in stages.elsewhere}
        self._staging, self.final = staging, final
        self._parts: dict[MetadataIndex, Tensor] = {}

    def prepare(self, *, copies: bool) -> None:
        """Find out what this rank writes; with ``copies`` nothing that happens to the model later changes it."""
        if not self._staging.is_dir():
            raise CheckpointError(
                f"{self._staging}, which rank {self._ranks.ranks[0]} has made, cannot be seen on this rank; save to a "
                "folder that all hosts share"
            )
        parts = own_parts(self._tensors, self._stages.first, self._ranks.own)
        self._parts = {index: part.to("cpu", copy=True) for index, part in parts.items()} if copies else parts

    def run(self, *, shown: bool) -> None:
        """Write this rank's part, and on the first rank complete the checkpoint once all have."""
        try:
            results, checksums = self._ranks.together(lambda: self._write(shown))
            loader = hashlib.sha256(json.dumps(self._snapshot.own["loader"]).encode()).hexdigest()
            entries = entries_of(self._tensors, self._stages.first)  # refuses on every rank what cannot be described
            brought = self._ranks.gathered(
                _Brought(
                    results=results,
                    checksums=checksums,
                    replica=self._snapshot.own["replica"],
                    loader=loader,
                    entries=entries if self._stages.tells else {},
                    snapshot=dataclasses.replace(self._snapshot, tensors={}),
                )
            )
            self._ranks.first(lambda: self._complete(brought))
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Remove what was written; done by the first rank."""
        if self._ranks.is_first:
            folders.discard(self._staging)
            self._claim.give_up()

    def _write(self, shown: bool) -> tuple[list[WriteResult], dict[MetadataIndex, str]]:
        position, first = self._ranks.position, self._ranks.is_first
        with folders.telling(f"writing to {self._staging}"):
            folders.write_json(self._staging / f"rank-{position}.json", self._snapshot.own)
            if not self._parts:
                return [], {}
            sizes = {key: tensor.size() for key, tensor in self._snapshot.tensors.items()}
            total = sum(part.nbytes for part in self._parts.values())
            writer = _Writer(self._staging, self.final)
            with Progress(total, f"saving {self.final.name}", shown=shown) as progress:
                planner = Writing(self._parts, sizes, progress)
                # The place of a plan among those of all ranks names its file.
                plans = [SavePlan([])] * position + [planner.create_local_plan()]
                writer.set_up_storage_writer(first)
                plan = writer.prepare_global_plan(plans)[position]
                return writer.write_data(plan, planner).wait(), planner.checksums

    def _complete(self, brought: list[_Brought]) -> None:
        entries = {key: entry for one in brought for key, entry in one.entries.items()}
        aliases = {alias: key for one in brought for alias, key in one.snapshot.aliases.items()}
        metadata = Metadata(entries, planner_data={key: tuple(key.split(".", 1)) for key in (*entries, *aliases)})
        results = [result for one in brought for result in one.results]
        checksums: dict[str, dict[str, str]] = {}  # by file and place in it
        for one in brought:
            for result in one.results:
                place = result.storage_data
                checksums.setdefault(place.relative_path, {})[str(place.offset)] = one.checksums[result.index]
        for alias, key in aliases.items():
            metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[key]
            results += [_renamed(result, alias) for result in results if result.index.fqn == key]
        replicas, loaders = [one.replica for one in brought], {one.loader for one in brought}
        with folders.telling(f"writing to {self._staging}"):
            _Writer(self._staging, self.final).finish(metadata, [results])
        step = int(self.final.name.removeprefix("step-"))
        own = self._stages.merged([one.snapshot.index for one in brought])
        index = {"step": step, **own, "aliases": aliases, "replicas": replicas, "loader is shared": len(loaders) == 1}
        folders.complete(self._staging, self.final, index, checksums)
        folders.prune(self.final, self._keep_last)
        self._claim.give_up()


def _renamed(result: WriteResult, key: str) -> WriteResult:
    index = dataclasses.replace(result.index, fqn=key)
    return dataclasses.replace(result, index=index)
