"""Pipelines, and the Booster with pipelines and without."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import shardcore
from shardcore_shardformer import Booster, HybridParallelPlugin
from training import Sharded, criterion_of

__all__ = ["Boosted", "Pipelined"]

#: What `HybridParallelPlugin` calls the sizes of a configuration, and the fields that it has under other names.
_PLUGIN = {
    "tensor_parallel_size": "tp_size",
    "pipeline_parallel_size": "pp_size",
    "dp_shard_size": "dp_size",
    "pipeline_schedule": "pp_style",
}


class _InStages(Sharded):
    """A model of which this rank may have some stages."""

    def held(self, *, gradients: bool = False) -> dict[str, Any]:
        """Return what the ranks hold together; where several hold one, each compares its own."""
        mine = super().held(gradients=gradients)
        if self.draw.pp == 1:
            return mine
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, mine)
        return {name: value for part in [*parts, mine] for name, value in part.items()}

    def loss_options(self) -> dict[str, Any]:
        """Return how a step is told its loss."""
        return {"loss": criterion_of(self.draw)} if self.draw.how.get("criterion") else {}


class Pipelined(_InStages):
    """Steps of a pipeline."""

    def backward(self, batches: list[dict[str, Any]], optimizer: torch.optim.Optimizer, *, last: bool) -> Tensor:
        """Run a step with this replica's batch."""
        return self.model.train_step(batches[self.replica], **self.loss_options())

    def clip(self, most: float) -> Tensor:
        """Clip by the norm of the whole model."""
        shardcore.reduce_partial_gradients(self.model)
        return self.model.clip_grad_norm_(most)

    def evaluated(self) -> dict[str, Tensor]:
        """Return what a call gives; the loss of a step without a backward has to be the same."""
        values = super().evaluated()
        if "loss" in values and not self.draw.how.get("criterion"):
            values["loss"] = self.model.eval_step(self.batch(9, 0, self.replica))
        return values


class Boosted(_InStages):
    """Steps of a boosted optimizer."""

    def shard(self) -> None:
        """Leave it to the Booster, which is given the optimizer too."""
        fields = {_PLUGIN.get(name, name): value for name, value in {**self.draw.mesh, **self.draw.fields}.items()}
        how = self.draw.how
        plugin = HybridParallelPlugin(**fields, max_norm=how["max_norm"], zero_stage=how["zero_stage"])
        self.booster, self._optimizer = Booster(plugin), super().optimizer()
        self.booster.boost(self.model, self._optimizer)

    def optimizer(self) -> torch.optim.Optimizer:
        """Return the boosted optimizer."""
        return self._optimizer

    def backward(self, batches: list[dict[str, Any]], optimizer: torch.optim.Optimizer, *, last: bool) -> Tensor:
        """Run a batch in micro-batches, or a plain call of the model."""
        batch, criterion = batches[self.replica], criterion_of(self.draw) if self.draw.how["criterion"] else None
        if self.draw.how["loop"] == "plain":
            if last:
                loss = self.loss(batch)
                self.booster.backward(loss, optimizer)
            else:
                with self.booster.no_sync(self.model, optimizer):
                    loss = self.loss(batch)
                    self.booster.backward(loss, optimizer)
            return loss.detach()
        return self.booster.execute_pipeline(iter([batch]), self.model, criterion, optimizer)["loss"].detach()

    def step(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """Step, which clips, and return the norm that was clipped by."""
        optimizer.step()
        norm = self.model._shardcore_boosted.norm
        return torch.zeros(()) if norm is None else norm
