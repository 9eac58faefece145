"""Some steps of training: what the unsharded model does, by torch alone, and what a sharded one does in its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import shardcore
from compared import Record, outputs_of, whole
from draws import Draw
from models import batch_of

__all__ = ["Sharded", "Whole", "odd_of", "replica_here"]

#: What is compared of an output; caches are left out, which one rank may have alone.
_SHOWN = (
    "loss",
    "aux_loss",
    "output",
    "logits",
    "prediction_logits",
    "seq_relationship_logits",
    "start_logits",
    "end_logits",
    "reconstruction",
)


def replica_here(draw: Draw) -> int:
    """Return whose batches this rank is called with."""
    return dist.get_rank() // (draw.tp * draw.mesh.get("context_parallel_size", 1)) % draw.replicas


def odd_of(draw: Draw) -> dict[str, Any]:
    """Return the arguments that this rank passes, and no other."""
    return dict(draw.odd["arguments"]) if draw.odd and dist.get_rank() == draw.odd["rank"] else {}


class Whole:
    """The training of the unsharded model: each loss is that of a whole batch in one call.

    Args:
        draw: what is trained.
        model: the unsharded model.
    """

    def __init__(self, draw: Draw, model: Any) -> None:
        self.draw, self.model = draw, model
        self.replica = replica_here(draw)

    def records(self) -> list[Record]:
        """Train, evaluate, and return what all calls gave."""
        how, found = self.draw.how, []
        optimizer = self.optimizer()
        for step in range(how["steps"]):
            record = Record(f"step {step}")
            found.append(record)

            def work(step: int = step, record: Record = record) -> Tensor:
                optimizer.zero_grad()
                for number in range(how["accumulate"]):
                    batches = [self.batch(step, number, replica) for replica in range(self.draw.replicas)]
                    loss = self.backward(batches, optimizer, last=number + 1 == how["accumulate"])
                    record.values[f"loss {number}"] = loss.clone()
                record.gradients.update(self.held(gradients=True))
                return loss

            if how.get("closure"):
                optimizer.step(work)
            else:
                work()
                record.values["norm"] = self.step(optimizer)
            record.values.update({f"parameter {name}": value for name, value in self.held().items()})
        found.append(Record("at the end", self.evaluated()))
        return found

    def batch(self, step: int, number: int, replica: int) -> dict[str, Any]:
        """Return the batch of one replica; those that are accumulated have other lengths."""
        longer = number if "length" in self.draw.batch else 0
        batch = batch_of(self.draw, self.model, 100 * step + 10 * number + replica, longer=longer)
        if self.draw.how.get("balanced"):
            batch["output_router_logits"] = True
        return batch

    def optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer of what is trained."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        if self.draw.how["optimizer"] == "sgd":
            return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)
        return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, eps=1e-4)

    def loss(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the loss of one call."""
        return criterion_of(self.draw)(self.model(**batch), batch)

    def backward(self, batches: list[dict[str, Any]], optimizer: torch.optim.Optimizer, *, last: bool) -> Tensor:
        """Run forward and backward of the batches of all replicas, and return the loss of this one's."""
        losses = [self.loss(batch) for batch in batches]
        torch.stack(losses).mean().backward()
        return losses[self.replica].detach()

    def step(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """Clip, step, and return the norm."""
        norm = torch.zeros(())
        if most := self.draw.how["max_norm"]:
            norm = self.clip(most)
        optimizer.step()
        return norm

    def clip(self, most: float) -> Tensor:
        """Clip, and return the norm."""
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), most)

    def held(self, *, gradients: bool = False) -> dict[str, Any]:
        """Return copies of all parameters, or of all gradients there are, whole."""
        found = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            value = parameter.grad if gradients else parameter
            if value is not None:
                found[name] = whole(value.detach()).clone()
        return found

    def evaluated(self) -> dict[str, Tensor]:
        """Return what a call without gradients gives, and all else that is compared at the end."""
        self.model.eval()
        return self.forward()

    @torch.no_grad()
    def forward(self) -> dict[str, Tensor]:
        """Return what is compared of a call without gradients."""
        out = self.model(**self.batch(9, 0, self.replica))
        return {name: whole(value).clone() for name, value in outputs_of(out) if name in _SHOWN}


class Sharded(Whole):
    """The same training of a sharded model, on one rank."""

    def shard(self) -> None:
        """Shard the model."""
        shardcore.shard(self.model, **self.draw.mesh, **self.draw.fields)

    def batch(self, step: int, number: int, replica: int) -> dict[str, Any]:
        """Return the batch of one replica, with what this rank alone passes."""
        return super().batch(step, number, replica) | odd_of(self.draw)

    def backward(self, batches: list[dict[str, Any]], optimizer: torch.optim.Optimizer, *, last: bool) -> Tensor:
        """Run forward and backward of this replica's batch; gradients are averaged over replicas."""
        loss = self.loss(batches[self.replica])
        loss.backward()
        return loss.detach()

    def clip(self, most: float) -> Tensor:
        """Clip, and return the norm of the whole model."""
        return whole(super().clip(most))


def criterion_of(draw: Draw) -> Any:
    """Return a function of the output and the batch: the model's own loss, or one that the draw has."""
    return {"": _own, "smoothing": _smoothing, "rows": _rows}[draw.how.get("criterion", "")]


def _own(out: Any, batch: Mapping[str, Any]) -> Tensor:
    return out["loss"]


def _smoothing(out: Any, batch: Mapping[str, Any]) -> Tensor:
    logits, labels = out["logits"], batch["labels"]
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), label_smoothing=0.1)


def _rows(out: Any, batch: Mapping[str, Any]) -> Tensor:
    logits = out if isinstance(out, Tensor) else out["logits"]
    return logits.square().flatten(1).mean(1).mean()
