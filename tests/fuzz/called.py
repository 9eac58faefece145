"""Tensor parallelism and replicas: every way to call a model, on one rank of the sharded one and unsharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import shardcore
from compared import Record, flat, outputs_of, weighted, whole
from draws import Draw
from models import batch_of, part_of, prompt_of
from shardcore_testing.parity import shared_gradients
from training import odd_of, replica_here

__all__ = ["Reference", "Run"]


class Run:
    """The calls of a draw on a sharded model, with the batches of one replica.

    Args:
        draw: the draw.
        model: the model.
    """

    def __init__(self, draw: Draw, model: Any) -> None:
        self.draw, self.model = draw, model
        self.replica = replica_here(draw)
        self.found: list[Record] = []

    def shard(self) -> None:
        """Shard the model."""
        shardcore.shard(self.model, **self.draw.mesh, **self.draw.fields)

    def forward(self) -> dict[str, Tensor]:
        """Return what a call without gradients gives."""
        with torch.no_grad():
            return self._recorded(self.model(**self._batch(0, self.replica)))

    def records(self) -> list[Record]:
        """Return what the calls gave."""
        if self.draw.call in ("evaluate", "generate"):
            self.model.eval()
        getattr(self, f"_{self.draw.call}")()
        return self.found

    def odd(self) -> dict[str, Any]:
        """Return what this rank alone passes."""
        return odd_of(self.draw)

    # What a reference does otherwise: it takes the batches of all replicas.

    def mean(self, loss_of: Callable[[int], Tensor]) -> Tensor:
        """Return the loss of this replica; gradients are averaged over replicas."""
        return loss_of(self.replica)

    def shown(self) -> int:
        """Return the replica whose outputs are recorded."""
        return self.replica

    # The calls.

    def _one(self) -> None:
        self._backward(self._loss(0, "one"))
        self._gradients()

    def _accumulate(self) -> None:
        for step in range(3):
            self._backward(self._loss(step, f"backward {step}"))
            self._gradients()

    def _retain(self) -> None:
        loss = self._loss(0, "retained")
        for again in (True, False):
            self._backward(loss, retain_graph=again)
            self._gradients()

    def _two_forwards(self) -> None:
        longer = 3 if self.draw.family in ("llama", "bert", "whisper") else 0
        first, second = self._loss(0, "first"), self._loss(1, "second", longer=longer)
        self._backward(first + second)
        self._gradients()

    def _no_grad_between(self) -> None:
        loss = self._loss(0, "outer")
        with torch.no_grad():
            self._loss(1, "between")
        self._backward(loss)
        self._gradients()

    def _autograd_grad(self) -> None:
        loss = self._loss(0, "grad")
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        if not named or not loss.requires_grad:
            return
        grads = torch.autograd.grad(loss, [p for _, p in named], allow_unused=True)
        self.found[-1].gradients.update({name: g for (name, _), g in zip(named, grads, strict=True)})

    def _steps(self) -> None:
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, eps=1e-4)
        for step in range(2):
            if step:
                self._cut_short()
                optimizer.zero_grad()
            for micro in range(2):
                self._backward(self._loss(2 * step + micro, f"step {step}.{micro}"))
            self._gradients()
            norm = torch.nn.utils.clip_grad_norm_(parameters, 0.1)
            self.found[-1].values["norm"] = whole(norm)
            with torch.set_grad_enabled(self.draw.number % 3 == 0):
                self._loss(9, f"before step {step}")
            optimizer.step()
            optimizer.zero_grad()
            self.found[-1].values.update({f"parameter {n}": p for n, p in _copies(self.model)})

    def _cut_short(self) -> None:
        """Call the model, of which a module in the middle raises: in the forward, or in the backward."""
        modules = [module for module in self.model.modules() if module._parameters and not list(module.children())]
        handle = modules[len(modules) // 2].register_forward_hook(_raises if self.draw.number % 2 else _raises_later)
        try:
            self._backward(self._loss(8, "cut short"))
        except CutShortError:
            self.found.pop()
        handle.remove()

    def _captured(self) -> None:
        wish = {"output_attentions": self.draw.model["attn_implementation"] == "eager", "output_hidden_states": True}
        self._backward(self._loss(0, "captured", **wish))
        self._gradients()

    def _evaluate(self) -> None:
        with torch.no_grad():
            self._loss(0, "evaluated")

    def _generate(self) -> None:
        batch = prompt_of(self._batch(0, self.shown()))
        tokens = self.model.generate(**batch, max_new_tokens=4, do_sample=False)
        self.found.append(Record("generated", {"tokens": tokens}))

    def _part(self) -> None:
        name, _ = part_of(self.draw, self._batch(0, self.shown()))
        record = Record(f"part {name or 'itself'}")
        self.found.append(record)

        def loss_of(replica: int) -> Tensor:
            _, arguments = part_of(self.draw, self._batch(0, replica))
            out = self.model.get_submodule(name)(**arguments) if name else self.model(**self._batch(0, replica))
            if replica == self.shown():
                record.values.update(dict(flat(out)))
            return weighted(out)

        self._backward(self.mean(loss_of))
        self._gradients()

    # Their parts.

    def _batch(self, seed: int, replica: int, longer: int = 0) -> dict[str, Any]:
        batch = batch_of(self.draw, self.model, 10 * seed + replica, longer=longer)
        if "inputs_embeds" in batch:
            batch["inputs_embeds"].requires_grad_()
        return batch

    def _loss(self, seed: int, title: str, longer: int = 0, **wish: Any) -> Tensor:
        """Call the model and return its loss; what it returned is recorded."""
        record = Record(title)
        self.found.append(record)

        def loss_of(replica: int) -> Tensor:
            batch = self._batch(seed, replica, longer)
            out = self.model(**batch, **wish, **self.odd())
            if replica == self.shown():
                record.values.update(self._recorded(out))
                leaves = {name: t for name, t in batch.items() if isinstance(t, Tensor) and t.requires_grad}
                self._leaves = leaves
            return _loss_of(self.draw, out, captured=bool(wish))

        loss = self.mean(loss_of)
        record.values["loss"] = loss.detach() if self.draw.replicas == 1 else torch.zeros(())
        return loss

    def _recorded(self, out: Any) -> dict[str, Tensor]:
        """Return the outputs that are compared: all, but for logits that a chunked loss never computes."""
        chunked = self.draw.fields.get("loss_chunk_size") is not None
        values = {name: whole(tensor.detach()) for name, tensor in outputs_of(out, skip=("logits",) if chunked else ())}
        return {n: t.clone() for n, t in values.items() if not (chunked and "logits" in n)}

    def _backward(self, loss: Tensor, **options: Any) -> None:
        if loss.requires_grad:
            loss.backward(**options)

    def _gradients(self) -> None:
        record = self.found[-1]
        for name, parameter in self.model.named_parameters():
            grad = parameter.grad
            record.gradients[name] = None if grad is None else whole(grad.detach()).clone()
        record.values["gradients in the memory of another"] = torch.tensor(float(len(shared_gradients(self.model))))
        if self.draw.replicas == 1:
            for name, leaf in getattr(self, "_leaves", {}).items():
                record.gradients[f"input {name}"] = None if leaf.grad is None else leaf.grad.clone()


class Reference(Run):
    """The calls of a draw on the unsharded model: the mean loss of all replicas, the outputs of this rank's."""

    def odd(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def mean(self, loss_of: Callable[[int], Tensor]) -> Tensor:
        """Return the mean of the losses of all replicas."""
        losses = [loss_of(replica) for replica in range(self.draw.replicas)]
        return torch.stack(losses).mean()


class CutShortError(Exception):
    """What a hook raises."""


def _raises(*_: Any) -> None:
    raise CutShortError


def _raises_later(module: nn.Module, inputs: Any, out: Any) -> None:
    if isinstance(out, Tensor) and out.requires_grad:
        out.register_hook(_raises)


def _copies(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # after a forward those that it gathered are parameters still
    for name, parameter in model.named_parameters():
        yield name, whole(parameter.detach()).clone()


def _loss_of(draw: Draw, out: Any, *, captured: bool) -> Tensor:
    """Return the loss of an output: the model's own if it has one, and a weighted sum of all that was captured."""
    loss = getattr(out, "loss", None)
    if loss is None or captured:
        # What is split (logits of a call with labels) has no part in a sum of its own.
        skip = ("logits", "prediction_logits") if loss is not None else ()
        rest = weighted(dict(outputs_of(out, skip)))
        loss = rest if loss is None else loss + rest
    return loss
