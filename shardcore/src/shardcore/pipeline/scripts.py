"""What is known of a model's forwards in a pipeline: a script for each form of micro-batches, rehearsed once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardcore.nn.copies import meta_copy
from shardcore.pipeline.rehearsal import Rehearsal
from shardcore.pipeline.script import Script, Value
from shardcore.pipeline.steps import Loss, Run, Scaled, checked, named, runs_of, wide
from shardcore.plan.cut import Cut

__all__ = ["Scripts"]

_KEPT = 64  # scripts for calls of other shapes: some bytes each


class Scripts:
    """The scripts of a model's micro-batches.

    Args:
        model: the whole model, sharded along ``tp``; what is rehearsed is a copy of it on meta.
        cut: where it is cut.
        device: where it computes.
        dtype: in which it will compute, where FSDP2 will cast.

    Attributes:
        rehearsal: makes them.
    """

    def __init__(self, model: nn.Module, cut: Cut, device: torch.device, dtype: torch.dtype | None) -> None:
        copy = meta_copy(model, dtype)
        self._model = model
        self._configs: dict[int, Any] = {}  # by identity
        for module, other in zip(model.modules(), copy.modules(), strict=True):
            if "config" in module.__dict__:  # what is set there later is rehearsed too
                other.__dict__["config"] = self._configs[id(module.config)] = module.config
        self.rehearsal = Rehearsal(copy, cut, device, dtype)
        self._known: dict[str, Script] = {}

    def runs(self, parts: Sequence[Mapping[str, Any]], loss: Loss | None) -> list[Run]:
        """Return of each micro-batch the run that it is of: those of one form have one script.

        Args:
            parts: the arguments of micro-batches.
            loss: of an output; None for outputs alone.
        """
        prefix = f"{self._model.training} {named(loss)} {self._settings()}"
        return runs_of(parts, lambda key, alike: self._script(key, alike, loss), prefix)

    def _settings(self) -> list[Any]:
        """Return what the configuration says now, of which a forward may do something else."""
        values = (value for config in self._configs.values() for value in vars(config).values())
        return [value for value in values if isinstance(value, bool | int | float | str | None)]

    def _script(self, key: str, alike: Sequence[Mapping[str, Any]], loss: Loss | None) -> Script:
        """Return the script of micro-batches of one form; its rehearsal needs one that has labels which count."""
        if (known := self._known.get(key)) is not None:
            return known
        for part in alike:
            given = None if loss is None else checked(loss, part)
            script = self.rehearsal(part, given, training=self._model.training)
            if isinstance(loss, Scaled) and script.loss is not None:
                script = dataclasses.replace(script, loss=Value.of(wide(script.loss.stand_in("meta"))))
            if all(form.shifted is not None for form in script.forms):
                break
        else:
            return script  # nobody can tell, and none of them counts
        while len(self._known) >= _KEPT:
            del self._known[next(iter(self._known))]
        self._known[key] = script
        return script
