"""Trainers of TRL that learn from rewards: what they gather by ranks, and batches that they size by ranks."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Iterator
from typing import Any

import accelerate.utils

from shardcore.errors import NotSupportedError
from shardcore_trainer._replicas import Replicas, sharded_in

#: Functions of accelerate that gather over all ranks, and what does it over replicas.
_OVER_REPLICAS = {"gather": Replicas.gather, "gather_object": Replicas.gather_objects}


class Gathering:
    """What a trainer of TRL does in its own way if its model was sharded; it stands before the class of the trainer."""

    model: Any
    _replicas: Replicas | Any

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train; what is gathered comes from each replica once."""
        with gathering_over(self._replicas), _generating_together(self.model, self._replicas):
            return super().train(*args, **kwargs)  # type: ignore[misc]  # of the Trainer

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate; what is gathered comes from each replica once."""
        with gathering_over(self._replicas), _generating_together(self.model, self._replicas):
            return super().evaluate(*args, **kwargs)  # type: ignore[misc]  # of the Trainer

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predict; what is gathered comes from each replica once."""
        with gathering_over(self._replicas), _generating_together(self.model, self._replicas):
            return super().predict(*args, **kwargs)  # type: ignore[misc]  # of the Trainer


@contextlib.contextmanager
def gathering_over(replicas: Replicas | None) -> Iterator[None]:
    """Let accelerate's functions in the modules of TRL gather over ``replicas`` in here; None: over ranks, as ever.

    TRL calls them by these names, not as methods of its Accelerator: rewards of one answer would count once for each
    rank of a replica.
    """
    kept = [] if replicas is None else list(_imported())
    try:
        for module, name, _ in kept:
            setattr(module, name, _OVER_REPLICAS[name].__get__(replicas))
        yield
    finally:
        for module, name, value in kept:
            setattr(module, name, value)


def _imported() -> Iterator[tuple[Any, str, Any]]:
    """Yield (module, name, value) of these functions in the modules of TRL, also of such as are replaced already."""
    for path, module in list(sys.modules.items()):
        if path.partition(".")[0] != "trl":
            continue
        for name, mine in _OVER_REPLICAS.items():
            value = vars(module).get(name)
            if value is getattr(accelerate.utils, name) or getattr(value, "__func__", None) is mine:
                yield module, name, value


@contextlib.contextmanager
def _generating_together(model: Any, replicas: Replicas | None) -> Iterator[None]:
    """Let replicas run as many forwards in ``generate`` as the longest: FSDP2 gathers weights in each."""
    sharded = sharded_in(model)
    if sharded is None or replicas is None or replicas.count == 1 or not hasattr(sharded, "generate"):
        yield
        return
    generate: Any = sharded.generate
    own = vars(sharded).get("generate")
    sharded.__dict__["generate"] = functools.partial(generate, synced_gpus=True)
    try:
        yield
    finally:
        del sharded.__dict__["generate"]
        if own is not None:
            sharded.__dict__["generate"] = own


def sized_by_replicas(args: Any, replicas: Replicas) -> Any:
    """Return the arguments of a trainer with batches of prompts that replicas fill; the same where these are ranks.

    They are sized when the arguments are made, by the number of ranks. The loader of a replica would take the second
    half of such a batch for the next one, and the trainer passes over it, since it has generated for all of it.

    Raises:
        NotSupportedError: the batches of all replicas have no whole groups of answers.
    """
    if getattr(args, "generation_batch_size", None) is None:
        return args
    size = args.per_device_train_batch_size * replicas.count * args.steps_per_generation
    if size == args.generation_batch_size:
        return args
    if size % args.num_generations:
        raise NotSupportedError(
            f"{size} answers are generated at a time (per_device_train_batch_size={args.per_device_train_batch_size} x "
            f"{replicas.count} replicas x steps_per_generation={args.steps_per_generation}), which are no whole groups "
            f"of num_generations={args.num_generations}. A device of these arguments is a replica of "
            f"{len(replicas.ranks)} ranks: raise per_device_train_batch_size"
        )
    args = copy.copy(args)
    args.generation_batch_size = size
    return args
