"""`Accelerator.save_state` and `load_state` of sharded models, through shardcore's own checkpoints."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from accelerate.utils import OPTIMIZER_NAME
from torch import nn

from shardcore.checkpoint import load_checkpoint, save_checkpoint
from shardcore.checkpoint.snapshot import generators_of, set_generators
from shardcore.errors import CheckpointError, ConfigError
from shardcore_trainer._replicas import sharded_in
from shardcore_trainer._schedules import made_in_steps_of, refuse_unable_to_change, steps_of

#: The folder of shardcore's checkpoint inside of one of Accelerate's or the Trainer's.
FOLDER = "shardcore"

#: What is kept in a checkpoint about schedules: how many steps each made with one of the optimizer.
_STEPS = "steps_of_schedulers"


def native_optimizer(optimizer: Any) -> Any:
    """Return the optimizer of the user inside of those that Accelerate puts around it."""
    while type(optimizer).__module__.startswith("accelerate.") and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def save_states(accelerator: Any, native: Callable[..., Any], output_dir: str | None, *args: Any, **kwargs: Any) -> Any:
    """Save what ``native`` saves, and the sharded models with their optimizers beside it; every rank calls it."""
    pairs = _pairs(accelerator)
    with _without(accelerator, pairs):
        location = native(output_dir, *args, **kwargs)
    extra = {_STEPS: steps_of(accelerator._schedulers)}
    for number, (model, optimizer) in enumerate(pairs):
        save_checkpoint(Path(location) / FOLDER / str(number), model, optimizer, extra=extra, keep_last=1)
    return location


def load_states(
    accelerator: Any, native: Callable[..., None], input_dir: str | None, *args: Any, **kwargs: Any
) -> None:
    """Load what `save_states` saved, on the same mesh or on another; every rank calls it."""
    pairs = _pairs(accelerator)
    folder = _folder(accelerator, input_dir)
    saved: list[int] = []
    _refuse_unsharded(accelerator, folder)
    for number, (model, optimizer) in enumerate(pairs):
        found = load_checkpoint(folder / FOLDER / str(number), model, optimizer)
        saved = (found.extra or {}).get(_STEPS, [])
    refuse_unable_to_change(accelerator._schedulers, saved)
    generators = [(model, generators_of(model)) for model, _ in pairs]
    with _without(accelerator, pairs):
        native(str(folder), *args, **kwargs)
    made_in_steps_of(accelerator._schedulers, saved)
    # Accelerate's files are one for each rank of the mesh that saved: this rank may have none, or that of a rank of
    # another replica.
    accelerator.step = accelerator._replicas.first(lambda: accelerator.step, "all")
    for model, states in generators:
        set_generators(model, states)


def _refuse_unsharded(accelerator: Any, folder: Path) -> None:
    own = accelerator._replicas.first((folder / FOLDER).is_dir, "all")
    if not own and accelerator._replicas.first((folder / f"{OPTIMIZER_NAME}.bin").exists, "all"):
        raise CheckpointError(
            f"{folder} is the state of a training whose models were not sharded: its optimizers know parameters by "
            "their numbers alone. Load the model's weights from it, shard the model and begin with a new optimizer; or "
            "load the state unsharded"
        )


def _folder(accelerator: Any, input_dir: str | None) -> Path:
    if input_dir is not None:
        return Path(input_dir).expanduser()
    if not accelerator.project_configuration.automatic_checkpoint_naming:
        raise ConfigError("load_state needs a folder, since automatic_checkpoint_naming is off")
    root = Path(accelerator.project_dir) / "checkpoints"
    found = sorted(root.iterdir(), key=lambda path: int(path.name.rpartition("_")[2]))
    if not found:
        raise ConfigError(f"load_state found no checkpoint in {os.fspath(root)}")
    return found[-1]


def _pairs(accelerator: Any) -> list[tuple[nn.Module, Any]]:
    """Return each sharded model with each of its optimizers."""
    found: list[tuple[nn.Module, Any]] = []
    for model in accelerator._models:
        if (sharded := sharded_in(model)) is None:
            continue
        own = {id(parameter) for parameter in sharded.parameters()}
        optimizers = [native_optimizer(optimizer) for optimizer in accelerator._optimizers]
        mine = [o for o in optimizers if any(id(p) in own for group in o.param_groups for p in group["params"])]
        found += [(sharded, optimizer) for optimizer in mine or [None]]
    return found


@contextlib.contextmanager
def _without(accelerator: Any, pairs: list[tuple[nn.Module, Any]]) -> Iterator[None]:
    """Let Accelerate forget the sharded models and their optimizers in here."""
    kept = accelerator._models, accelerator._optimizers
    saved = {id(optimizer) for _, optimizer in pairs}
    accelerator._models = [model for model in accelerator._models if sharded_in(model) is None]
    accelerator._optimizers = [o for o in accelerator._optimizers if id(native_optimizer(o)) not in saved]
    try:
        yield
    finally:
        accelerator._models, accelerator._optimizers = kept
