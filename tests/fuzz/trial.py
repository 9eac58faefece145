"""Carrying out one draw on one rank: the sharded model beside the unsharded one, in float64."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardcore
from draws import Draw
from models import batch_of, build, part_of, prompt_of
from shardcore.errors import ShardcoreError
from shardcore.testing.islands import no_float32_islands
from shardcore.testing.parity import shared_gradients, whole
from shardcore.testing.subject import flat

__all__ = ["BOUND", "Outcome", "try_draw"]

#: The largest difference that rounding in float64 makes, relative to the largest value.
BOUND = 1e-11


@dataclass
class Outcome:
    """What came of a draw on one rank.

    Attributes:
        state: ``equal``, ``refused`` (as it has to be), ``unsharded`` (the unsharded model cannot do it), ``failed``.
        error: the largest relative difference.
        compared: the number of tensors that were compared.
        problems: what differs.
    """

    state: str = "equal"
    error: float = 0.0
    compared: int = 0
    problems: list[str] = field(default_factory=list)

    def compare(self, name: str, wanted: Tensor | None, got: Tensor | None, scale: float = 0.0) -> None:
        """Compare two tensors; both may be missing."""
        if wanted is None or got is None:
            if wanted is not got:
                self.problems.append(f"{name}: {_shape(wanted)} unsharded, {_shape(got)} sharded")
            return
        wanted, got = wanted.detach(), whole(got.detach())
        if wanted.shape != got.shape:
            self.problems.append(f"{name}: {_shape(wanted)} unsharded, {_shape(got)} sharded")
            return
        self.compared += 1
        if not wanted.numel():
            return
        if not torch.equal(wanted.isnan(), got.isnan()):
            self.problems.append(f"{name}: NaN in other places")
            return
        wanted, got = wanted.double().nan_to_num(), got.double().nan_to_num()
        largest = scale or float(wanted.abs().max()) or 1.0
        error = float((wanted - got).abs().max()) / largest
        self.error = max(self.error, error)
        if error > BOUND:
            self.problems.append(f"{name}: relative difference {error:.3g}")


def _shape(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else str(tuple(tensor.shape))


@no_float32_islands()
def try_draw(draw: Draw) -> Outcome:
    """Carry out a draw on this rank; called on each rank of a process group with as many as the draw wants."""
    outcome = Outcome()
    reference = build(draw)
    model = copy.deepcopy(reference)
    if draw.checkpointing:
        for one in (reference, model):
            _checkpoint(one, reentrant=draw.checkpointing == "reentrant")
    wanted = _unsharded(draw, reference)
    if isinstance(wanted, str):
        return Outcome(state="unsharded", problems=[wanted])
    before = {name: id(p) for name, p in model.named_parameters()}
    try:
        shardcore.shard(model, **draw.mesh, **draw.fields)
    except ShardcoreError as error:
        same = before == {name: id(p) for name, p in model.named_parameters()}
        if not draw.refused() or not same:
            outcome.problems.append(f"{type(error).__name__}: {error}" + ("" if same else " (and the model changed)"))
        outcome.state = "failed" if outcome.problems else "refused"
        return outcome
    if why := draw.refused():
        outcome.problems.append(f"was sharded, though {why} do not fit")
    dist.barrier()
    got = _Run(draw, model, replica=dist.get_rank() // draw.tp).records()
    for one, other in zip(wanted, got, strict=True):
        _compare(outcome, one, other)
    outcome.state = "failed" if outcome.problems else "equal"
    return outcome


def _checkpoint(model: Any, *, reentrant: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer releases of transformers have another name for it
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})


def _compare(outcome: Outcome, wanted: Record, got: Record) -> None:
    for key in dict.fromkeys([*wanted.values, *got.values]):
        outcome.compare(f"{wanted.title}: {key}", wanted.values.get(key), got.values.get(key))
    # Some true gradients are zero (key biases): errors are measured by the largest gradient of the model.
    sizes = (float(g.abs().nan_to_num().max()) for g in wanted.gradients.values() if g is not None and g.numel())
    scale = max(sizes, default=0.0)
    for key in dict.fromkeys([*wanted.gradients, *got.gradients]):
        mine, theirs = wanted.gradients.get(key), got.gradients.get(key)
        outcome.compare(f"{wanted.title}: gradient of {key}", mine, theirs, scale)


@dataclass
class Record:
    """What one call of a run gave.

    Attributes:
        title: for messages.
        values: outputs, losses, parameters.
        gradients: of parameters and inputs.
    """

    title: str
    values: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)


def _unsharded(draw: Draw, reference: nn.Module) -> list[Record] | str:
    """Return the records of the unsharded model, or why there are none."""
    try:
        return _Reference(draw, reference).records()
    except Exception as error:  # whatever the library cannot do is not asked of the sharded model
        return f"{type(error).__name__}: {error}"


class _Run:
    """The calls of a draw on a sharded model, with the batches of one replica.

    Args:
        draw: the draw.
        model: the model.
        replica: whose batches it is called with.
    """

    def __init__(self, draw: Draw, model: Any, replica: int) -> None:
        self.draw, self.model, self.replica = draw, model, replica
        self.optimizer: torch.optim.Optimizer | None = None
        self.found: list[Record] = []

    def records(self) -> list[Record]:
        """Return what the calls gave."""
        if self.draw.call in ("evaluate", "generate"):
            self.model.eval()
        getattr(self, f"_{self.draw.call}")()
        return self.found

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
            for micro in range(2):
                self._backward(self._loss(2 * step + micro, f"step {step}.{micro}"))
            self._gradients()
            norm = torch.nn.utils.clip_grad_norm_(parameters, 0.1)
            self.found[-1].values["norm"] = whole(norm)
            optimizer.step()
            optimizer.zero_grad()
            self.found[-1].values.update({f"parameter {n}": p for n, p in _copies(self.model)})

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
            return _weighted(out)

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
            out = self.model(**batch, **wish)
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
        values = {name: whole(tensor.detach()) for name, tensor in _outputs(out, skip=("logits",) if chunked else ())}
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


class _Reference(_Run):
    """The calls of a draw on the unsharded model: the mean loss of all replicas, the outputs of this rank's."""

    def __init__(self, draw: Draw, model: Any) -> None:
        super().__init__(draw, model, replica=dist.get_rank() // draw.tp)

    def mean(self, loss_of: Callable[[int], Tensor]) -> Tensor:
        """Return the mean of the losses of all replicas."""
        losses = [loss_of(replica) for replica in range(self.draw.replicas)]
        return torch.stack(losses).mean()


def _copies(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        yield name, whole(parameter.detach()).clone()


def _outputs(out: Any, skip: Sequence[str] = ()) -> Iterator[tuple[str, Tensor]]:
    if isinstance(out, Tensor) or not hasattr(out, "items"):
        yield from flat(out)
        return
    for name, value in out.items():
        if name not in skip:
            yield from flat(value, str(name))


def _loss_of(draw: Draw, out: Any, *, captured: bool) -> Tensor:
    """Return the loss of an output: the model's own if it has one, and a weighted sum of all that was captured."""
    loss = getattr(out, "loss", None)
    if loss is None or captured:
        # What is split (logits of a call with labels) has no part in a sum of its own.
        skip = ("logits", "prediction_logits") if loss is not None else ()
        rest = _weighted(dict(_outputs(out, skip)))
        loss = rest if loss is None else loss + rest
    return loss


def _weighted(out: Any) -> Tensor:
    """Return a mean of everything in an output, with weights that are drawn: every element counts."""
    generator = torch.Generator().manual_seed(7)
    total = torch.zeros((), dtype=torch.float64)
    for _, tensor in flat(out):
        if tensor.is_floating_point() and tensor.numel():
            weights = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            total = total + (tensor * weights).mean()
    return total
