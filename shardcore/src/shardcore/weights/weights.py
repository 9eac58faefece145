"""Where the tensors of a model come from that is sharded without values, and how they are given to `shardcore.shard`.

That they fit is checked before anything is changed; they are read when the model is sharded.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from torch import Tensor, nn

from shardcore.errors import ConfigError, ShardcoreWarning
from shardcore.mesh.context import ShardContext
from shardcore.plan import ShardPlan
from shardcore.plan.shard_plan import ModelPhase
from shardcore.weights.files import Files
from shardcore.weights.materialize import materialize, speaks
from shardcore.weights.recipes import Recipe

#: Where files are: one of them, several, or their folder.
Place: TypeAlias = str | Path | Sequence[str | Path]

_SHOWN = 8  # names in one message


@dataclass(frozen=True, slots=True)
class Weights:
    """What the parameters and buffers of a model are made from."""

    recipes: Mapping[str, Recipe]  # by every name that a parameter or buffer has
    files: Files | None = None  # what they read, if they do
    unused: tuple[str, ...] = ()  # keys of the files that no tensor of the model takes, and nobody was told of

    @classmethod
    def of(cls, model: nn.Module, given: Weights | Place) -> Weights:
        """Return the weights that a user gives for ``model``: a checkpoint whose keys are the names of its tensors.

        Raises:
            ConfigError: the files do not hold what the model needs, lists all of it.
        """
        if isinstance(given, Weights):
            weights = given
        elif isinstance(given, str | Path | list | tuple):
            files = Files.at(given)
            known = {name for name, _ in _tensors(model)}
            unused = tuple(key for key in files.tensors if key not in known)
            weights = cls({key: files.source(key) for key in files.tensors}, files, unused)
        else:
            raise ConfigError(
                f"weights= must be a .safetensors file, a list of them or a folder that holds them, got "
                f"{type(given).__name__}"
            )
        weights = cls(dict(weights._by_every_name(model)), weights.files, weights.unused)
        weights.check(model)
        return weights

    def _by_every_name(self, model: nn.Module) -> Iterator[tuple[str, Recipe]]:
        """Yield the recipes for all names of a tensor; files hold tied ones under one of them."""
        known: dict[int, Recipe] = {}
        named = list(_tensors(model))
        for name, tensor in named:
            if name in self.recipes:
                known.setdefault(id(tensor), self.recipes[name])
        yield from ((name, known[id(tensor)]) for name, tensor in named if id(tensor) in known)

    def check(self, model: nn.Module) -> None:
        """Refuse weights that leave tensors of ``model`` without values, or are of another shape; list these."""
        wanted = dict(_tensors(model))
        where = f" in {self.place}" if self.place else ""
        missing = [n for n, t in wanted.items() if n not in self.recipes and t.is_meta]
        misfits = [
            f"{name} is {recipe.shape} there and {tuple(wanted[name].shape)} in the model"
            for name, recipe in self.recipes.items()
            if name in wanted and recipe.shape != tuple(wanted[name].shape)
        ]
        if misfits:
            raise ConfigError(
                f"the weights{where} do not fit this {type(model).__name__}: {_listed(misfits)}. Build the model "
                "with the configuration of the checkpoint"
            )
        if missing:
            raise ConfigError(
                f"the weights{where} lack {len(missing)} tensors of this {type(model).__name__}: "
                f"{_listed(missing)}. Their keys have to be the names that model.state_dict() has; buffers that are "
                "not saved have to be real: build the model with shardcore.on_meta(MyModel, ...). What a "
                "library has saved is loaded by shardcore.from_pretrained, which knows older names and makes the rest"
            )

    @property
    def place(self) -> str:
        """Where the files are, in the user's words; empty if there are none."""
        return "" if self.files is None else self.files.place


class Materializing(ModelPhase):
    """What is read into a model after it was sharded, and what has to hold for it before.

    Raises:
        ConfigError: the weights do not fit the model, or the values of a rank are to be taken as well.
    """

    def __init__(self, model: nn.Module, weights: Weights | Place, sync_from: int | None) -> None:
        if sync_from is not None:
            raise ConfigError(
                f"weights= and sync_from={sync_from} both say where the values come from; leave one of them out"
            )
        self._model = model
        self._weights = Weights.of(model, weights)
        if speaks() and (unused := self._weights.unused):
            warnings.warn(
                f"{self._weights.place} holds tensors that this {type(model).__name__} has no place for: "
                f"{_listed(unused)}; they are not read",
                ShardcoreWarning,
                stacklevel=3,  # where `shardcore.shard` was called
            )

    def items(self) -> Iterator[tuple[str, str]]:
        """Yield what has to be the same on every rank."""
        files = self._weights.files
        told = "not from files" if files is None else f"{len(files.tensors)} tensors, {files.digest}"
        yield "the tensors of weights=", told

    def runs(self, context: ShardContext | None) -> bool:
        """Also of a model that was not sharded."""
        return True

    def apply(self, context: ShardContext | None, plan: ShardPlan) -> None:
        """Read this rank's part of every tensor."""
        weights = self._weights
        try:
            materialize(self._model, weights.recipes, context, f"loading {weights.place}".strip())
        finally:
            if weights.files is not None:
                weights.files.close()


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
