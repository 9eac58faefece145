"""`load_checkpoint`: a training goes on where it was, on the same mesh or on another one."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, overload

from torch import Tensor, nn
from torch.optim import Optimizer

from shardcore.checkpoint.folders import find, find_any
from shardcore.checkpoint.ranks import RankGroup
from shardcore.checkpoint.reading import Checkpoint
from shardcore.checkpoint.saving import Saves
from shardcore.checkpoint.snapshot import replica_of, set_generators
from shardcore.checkpoint.state import ModelState, restored, set_values
from shardcore.errors import CheckpointError
from shardcore.mesh.context import unwrapped


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What was loaded.

    Attributes:
        path: the folder of the checkpoint.
        step: its number.
        extra: what was given to `save_checkpoint` as ``extra``.
    """

    path: Path
    step: int
    extra: Any


@overload
def load_checkpoint(
    where: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    scheduler: Any = None,
    loader: Any = None,
    missing_ok: Literal[False] = False,
    verify: bool = True,
) -> Loaded: ...


@overload
def load_checkpoint(
    where: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    scheduler: Any = None,
    loader: Any = None,
    missing_ok: bool,
    verify: bool = True,
) -> Loaded | None: ...


def load_checkpoint(
    where: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    scheduler: Any = None,
    loader: Any = None,
    missing_ok: bool = False,
    verify: bool = True,
) -> Loaded | None:
    """Load what `save_checkpoint` wrote, into objects that were made as they were made then.

    Called on every rank of the model. The mesh may be another one: each rank reads what it holds. On the same mesh the
    training goes on bit for bit, dropout included; on another one with the same parameters and other dropout masks.
    Nothing in the files is run.

    Args:
        where: a checkpoint, or a folder of them, of which the newest complete one is taken (see `shardcore.latest`; the
            first rank chooses).
        model: sharded or not, with the same names, shapes and dtypes.
        optimizer: of the same parameters; its groups get the saved options, such as ``lr``.
        scheduler: as it was saved. Anything that is not given here is left out.
        loader: as it was saved.
        missing_ok: a folder without a complete checkpoint, or that is not there, is none to go on from: return None.
            The first rank looks, so that all ranks do the same on a file system that shows them different things.
        verify: compare what is read with the checksums of the checkpoint. What was damaged is an error, where False
            takes it as it is.

    Returns:
        What was loaded, or None.

    Raises:
        CheckpointError: it is not complete or damaged, is of another model, or lacks what is asked for. Unless the
            message says otherwise, nothing was changed.
        ConfigError: an argument does not fit.
        AgreementError: another rank failed.
        MissingRanksError: a rank did not come or is gone.
    """
    model = unwrapped(model)
    Saves.of(model).wait()
    ranks = RankGroup.of(model, "load_checkpoint")
    path = ranks.first(lambda: find_any(where) if missing_ok else find(where))
    if path is None:  # on all ranks alike
        ranks.together(lambda: None, items=lambda _: [("the argument missing_ok", str(missing_ok))])
        return None
    restoring = ranks.together(
        lambda: _Restoring(Checkpoint(path, verify=verify), ranks, model, optimizer, scheduler, loader)
    )
    ranks.together(restoring.place)
    ranks.together(restoring.fill, changing=True)
    ranks.together(restoring.finish, changing=True)
    checkpoint = restoring.checkpoint
    return Loaded(path=checkpoint.path, step=checkpoint.step, extra=checkpoint.value("extra"))


class _Restoring:
    """One load on one rank; making it checks everything that can be known before something is changed."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        ranks: RankGroup,
        model: nn.Module,
        optimizer: Optimizer | None,
        scheduler: Any,
        loader: Any,
    ) -> None:
        self.checkpoint, self._ranks, self._model = checkpoint, ranks, model
        self._scheduler, self._loader = scheduler, loader
        state = ModelState.of(model)
        state.check(checkpoint.metadata)
        self._targets: dict[str, Tensor] = {f"model.{name}": tensor for name, tensor in state.tensors.items()}
        self._give: Callable[[], None] | None = None
        if optimizer is not None:
            kept = self._asked("optimizer", checkpoint.index.get("optimizer"))
            rooms, self._give = restored(kept, checkpoint.metadata, optimizer, model)
            self._targets |= {f"optimizer.state.{name}": room for name, room in rooms.items()}
        self._schedule = None if scheduler is None else self._asked("scheduler", checkpoint.value("scheduler"))
        self._own, self._further = self._states()
        self._position = None if loader is None else self._asked("loader", self._own["loader"])

    def _asked(self, name: str, saved: Any) -> Any:
        if saved is None:
            raise CheckpointError(
                f"checkpoint {self.checkpoint.path} was saved without a {name}; nothing was loaded. Leave {name}= out."
            )
        return saved

    def _states(self) -> tuple[dict[str, Any], int]:
        """Return what a rank in the place of this one saved, and which replica beyond the saved ones this is."""
        index = self.checkpoint.index
        replicas = index["replicas"]
        mine, now = replica_of(self._model, self._ranks)
        count = max(replicas) + 1
        if len(replicas) == len(self._ranks.ranks) and replicas[self._ranks.position] == mine:
            at = self._ranks.position
        else:
            at = replicas.index(mine % count)
        further = max(0, mine - count + 1)
        if self._loader is not None and not index["loader is shared"] and now != count:
            raise CheckpointError(
                f"checkpoint {self.checkpoint.path} has a position of the loader for each of {count} replicas, which "
                "another number of them cannot take up; nothing was loaded. Resume on as many, or use a "
                "shardcore_loop.ShardedDataLoader."
            )
        return self.checkpoint.of_rank(at), further

    def place(self) -> None:
        """Let the loader take up its position, which it may refuse, before anything else is changed."""
        if self._loader is not None:
            self._loader.load_state_dict(self._position)

    def fill(self) -> None:
        """Read the tensors."""
        self.checkpoint.fill(self._targets, shown=self._ranks.is_first)

    def finish(self) -> None:
        """Give the rest to those it belongs to."""
        set_values(self._model, self.checkpoint.value("modules"))
        if self._give is not None:
            self._give()
        if self._scheduler is not None:
            self._scheduler.load_state_dict(self._schedule)
        set_generators(self._model, self._own["generators"], further=self._further)
