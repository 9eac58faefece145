"""FSDP2 over the micro-batches of a pipeline: gathered once, and gradients summed once, for each step.

Between the first micro-batch and the last one parameters stay gathered, and their gradients whole: a backward that is
split looks for parameters where they were in the forward, and each micro-batch would send all of them again. What is
divided between steps, the parameters, gradients and the state of optimizers, is what ZeRO's first stage divides
(Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054).
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch import nn

from shardcore.fsdp.units import parameter_groups, unit_of


class Accumulation:
    """The micro-batches of one step of a model, to which FSDP2 may have been applied."""

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = model
        self._unit = unit_of(model)
        self._held = contextlib.ExitStack()

    def hold(self) -> None:
        """Keep what is gathered until the parameters are divided again: micro-batches follow one another."""
        if self._unit is not None:
            self._held.enter_context(self._unit.hold())

    def begin(self) -> None:
        """Gather all parameters, and let backwards leave gradients alone."""
        if self._unit is None:
            return
        self.hold()
        self._switch(sums=False)
        self._model._get_fsdp_state()._lazy_init()  # or else the first block that gathers would be the root
        for unit in self._unit.all():
            unit.module.unshard()  # type: ignore[operator]  # of FSDPModule

    def finish(self) -> None:
        """Sum the gradients over the replicas, and divide them and the parameters again."""
        if self._unit is None:
            return
        self._switch(sums=True)
        root = self._model._get_fsdp_state()
        # What a backward does at the end of each unit, and at its own: torch's pipelines do the same.
        for state in root._state_ctx.all_states:
            for group in parameter_groups(state):
                group.post_backward()
        root._root_post_backward_final_callback()
        self.divide()

    def give_up(self) -> None:
        """Remove all gradients, and divide the parameters again."""
        if self._unit is not None:
            self._switch(sums=True)
            self._held.close()
            self._unit.reset(gradients=True)
        self._model.zero_grad(set_to_none=True)

    def divide(self) -> None:
        """Divide the parameters again, as after calls without gradients."""
        self._held.close()
        for unit in () if self._unit is None else self._unit.all():
            unit.module.reshard()  # type: ignore[operator]  # of FSDPModule

    def _switch(self, *, sums: bool) -> None:
        self._model.set_is_last_backward(sums)
        self._model.set_reshard_after_backward(sums)
        self._model.set_requires_gradient_sync(sums)
