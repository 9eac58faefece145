"""FSDP2 over the micro-batches of a pipeline: gathered once, and gradients summed once, for each step.

Between the first micro-batch and the last one parameters stay gathered, and their gradients whole: a backward that is
split looks for parameters where they were in the forward, and each micro-batch would send all of them again. What is
divided between steps, the parameters, gradients and the state of optimizers, is what ZeRO's first stage divides
(Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054).
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


class Accumulation:
    """The micro-batches of one step of a model, to which FSDP2 may have been applied."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._fsdp: Any = model if isinstance(model, FSDPModule) else None
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._units: list[Any] = [] if self._fsdp is None else units

    def begin(self) -> None:
        """Gather all parameters, and let backwards leave gradients alone."""
        if self._fsdp is None:
            return
        self._switch(sums=False)
        self._fsdp._get_fsdp_state()._lazy_init()  # or else the first block that gathers would be the root
        for unit in self._units:
            unit.unshard()

    def finish(self) -> None:
        """Sum the gradients over the replicas, and divide them and the parameters again."""
        if self._fsdp is None:
            return
        self._switch(sums=True)
        root = self._fsdp._get_fsdp_state()
        # What a backward does at the end of each unit, and at its own: torch's pipelines do the same.
        for state in root._state_ctx.all_states:
            for group in parameter_groups(state):
                group.post_backward()
        root._root_post_backward_final_callback()
        self.divide()

    def give_up(self) -> None:
        """Remove all gradients, and divide the parameters again."""
        self._model.zero_grad(set_to_none=True)
        if self._fsdp is not None:
            self._switch(sums=True)
            self.divide()
            self._model.zero_grad(set_to_none=True)

    def divide(self) -> None:
        """Divide the parameters again, as after calls without gradients."""
        for unit in self._units:
            unit.reshard()

    def _switch(self, *, sums: bool) -> None:
        self._fsdp.set_is_last_backward(sums)
        self._fsdp.set_reshard_after_backward(sums)
        self._fsdp.set_requires_gradient_sync(sums)


def parameter_groups(state: Any) -> list[Any]:
    """Return the parameters that a unit gathers at once, in one group or, since torch 2.12, in several."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
