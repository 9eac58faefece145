"""What happens to gradients between the last backward and the optimizer's step: one scale, one norm, one decision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardcore.comm.dtensor_params import local_tensor
from shardcore.errors import NotSupportedError
from shardcore.mesh.context import context_of
from shardcore.nn.partial import reduce_partial_gradients
from shardcore.pipeline.norms import clip_grads, grad_norm
from shardcore_shardformer.plugin import HybridParallelPlugin


class Stepping:
    """Unscales and clips gradients before each step of the user's optimizer, and skips a step that overflowed.

    The norm is that of the whole model, the same number on every rank, so that all ranks skip a step or none does. A
    step is skipped by taking the gradients away: torch's optimizers leave parameters without one alone, and their
    state.

    Args:
        plugin: says how.
        model: the sharded model.

    Attributes:
        scale: what losses are multiplied with.
        norm: that of the gradients before the last step; None before the first, and where nobody asks for it.
        skipped: how many steps were skipped.
        accumulates: gradients of replicas are left alone for now; `shardcore_shardformer.Booster.no_sync` sets it.
    """

    def __init__(self, plugin: HybridParallelPlugin, model: nn.Module) -> None:
        self._plugin, self._model = plugin, model
        self.scale = plugin.initial_scale if plugin.precision == "fp16" else 1.0
        self.norm: Tensor | None = None
        self.skipped, self.accumulates = 0, False
        self._since = 0  # steps since the scale last changed

    def watch(self, optimizer: Optimizer) -> None:
        """Let every step of ``optimizer`` come through here."""
        optimizer.register_step_pre_hook(self._before)

    def state_dict(self) -> dict[str, Any]:
        """Return the scale, and how long it has held."""
        return {"scale": self.scale, "since": self._since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.scale, self._since = float(state["scale"]), int(state["since"])

    @torch.no_grad()
    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        scales = self._plugin.precision == "fp16"
        context = context_of(self._model)
        closure = kwargs.get("closure") or next(iter(args[1:]), None)
        if closure is not None and (scales or self._plugin.max_norm or (context is not None and context.defers)):
            raise NotSupportedError(
                "optimizer.step(closure) of a boosted optimizer: gradients are unscaled, summed and clipped before the "
                "step, and the closure computes them in it; call it before, then optimizer.step(); or train without "
                "precision='fp16', max_norm and deferred partial gradients"
            )
        if context is not None:
            reduce_partial_gradients(self._model)
        if not scales and not self._plugin.max_norm:
            return
        if scales:
            for parameter in self._model.parameters():
                if parameter.grad is not None:
                    local_tensor(parameter.grad).div_(self.scale)
        self.norm = grad_norm(self._model)
        overflowed = scales and not bool(self.norm.isfinite())
        if overflowed:
            self._model.zero_grad(set_to_none=True)
            self.skipped += 1
        elif self._plugin.max_norm:
            clip_grads(self._model, self.norm, self._plugin.max_norm)
        if scales:
            self._rescale(overflowed=overflowed)

    def _rescale(self, *, overflowed: bool) -> None:
        self._since = 0 if overflowed else self._since + 1
        if overflowed:
            self.scale = max(self._plugin.min_scale, self.scale * self._plugin.backoff_factor)
        elif self._since >= self._plugin.growth_interval:
            self.scale, self._since = self.scale * self._plugin.growth_factor, 0
