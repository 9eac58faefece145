"""Checks of models that are cut into stages, which run one after the other in one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shardcore._torch import CAN_PIPELINE
from shardcore.api import shard
from shardcore.errors import ConfigError, ShardcoreError
from shardcore.pipeline import Cut, PrunedModel, Stage, StageTracer
from shardcore_testing.findings import Ledger
from shardcore_testing.parity import whole
from shardcore_testing.subject import Subject, checkpointing, flat, meta_copy

_MICRO_BATCHES = 2
MOST_STAGES = 6


def pipeline(s: Subject, ledger: Ledger) -> None:
    """The model, cut into as many stages as it has blocks, computes what the whole one does.

    All micro-batches are in flight before the first backward, and blocks are recomputed in it if they can be. No
    parameter is lost, and none is held by a stage that the cut does not say.
    """
    with ledger.check("pipeline"):
        if not s.case.supports.pipeline:
            ledger.closed("pipeline parallelism")
            return
        reference = s.build()
        cut = _finest(s, reference)
        if cut is None:
            ledger.closed("the model has no two blocks")
            return
        with ledger.place(f"{len(cut)} stages"):
            _compare(s, ledger, cut)


def schedules(s: Subject, ledger: Ledger) -> None:
    """Over ranks, each of which has one stage or two, a batch of four micro-batches gives the whole model's gradients.

    These are of one call of the unsharded model with the whole batch, whose micro-batches have unlike numbers of items.
    The model is cut among the ranks; what the ranks share, such as tied weights, has one gradient on all of them. With
    four ranks each stage is shared by two as well, which split its heads, and its tokens where that is supported.
    """
    with ledger.check("schedules"):
        if not (CAN_PIPELINE and s.case.supports.pipeline):
            ledger.closed("pipeline parallelism" if CAN_PIPELINE else "pipelines, which torch before 2.13 lacks")
            return
        cut = _finest(s, s.build())
        trials = [] if cut is None else list(_trials(s, len(cut.blocks)))
        if not trials:
            ledger.closed(f"the model has no {s.tp} blocks")
            return
        for fields in trials:
            with ledger.place(" ".join(f"{name}={value}" for name, value in fields.items())):
                _train(s, ledger, fields)


def _trials(s: Subject, blocks: int) -> Iterator[dict[str, Any]]:
    """Yield how the model is divided: by the fields of its configuration."""
    if blocks >= s.tp:  # several blocks in a stage, whose gradients of parameters are computed by themselves
        yield {"pp": s.tp, "pipeline_schedule": "interleaved_zero_bubble", "num_model_chunks": 1}
    if blocks >= 2 * s.tp:
        yield {"pp": s.tp, "pipeline_schedule": "zbv"}
    if s.tp == 4 and 2 in s.case.supports.tensor_parallel:
        tokens = {"enable_sequence_parallelism": True} if s.case.supports.sequence else {}
        for schedule in ("1f1b", *(["zbv"] if blocks >= 4 else [])):
            yield {"pp": 2, "tp": 2, "pipeline_schedule": schedule, **tokens}
    if s.tp == 4 and s.case.supports.context and s.lacks_context() is None:
        yield {"pp": 2, "cp": 2, "pipeline_schedule": "zbv" if blocks >= 4 else "1f1b"}


def _train(s: Subject, ledger: Ledger, fields: Mapping[str, Any]) -> None:
    number = 2 * fields["pp"]
    reference = s.build()
    batches = [s.inputs(reference, seed) for seed in range(number)]
    rows = next(t.size(0) for _, t in flat(batches[0]) if t.ndim)
    batch = {name: _joined([part[name] for part in batches], rows) for name in batches[0]}
    try:
        out = reference(**batch)
    except Exception as error:
        ledger.closed(f"the unsharded model cannot be called with several batches of the case as one: {error}")
        return
    if not s.case.supports.micro_batches:
        _refuses(s, ledger, batch, num_microbatches=number, **fields)
        number, rows = 1, number * rows
    model = s.build()
    pipe: Any = shard(model, policy=s.policy(model), num_microbatches=number, **fields)
    got = pipe.train_step(batch, loss=lambda out, _: s.loss(out))
    # A loss of the model itself is that of the whole batch; one of the case may weigh each row by its place.
    made = [out] if isinstance(s.case.loss, str) else [_rows(out, rows, number, part) for part in range(number)]
    wanted = torch.stack([s.loss(of_part) for of_part in made]).mean()
    wanted.backward()
    ledger.close("loss", wanted, got)
    ledger.close("loss in evaluation", wanted, pipe.eval_step(batch, loss=lambda out, _: s.loss(out)))
    names = dict(reference.named_parameters(remove_duplicate=False))
    scale = max(float(p.grad.abs().max()) for p in names.values() if p.grad is not None) or 1.0
    for name, parameter in pipe.named_parameters(remove_duplicate=False):
        grad, got = names[name].grad, None if parameter.grad is None else whole(parameter.grad)
        if grad is None or got is None:
            other = got if grad is None else grad
            ledger.true(other is None or not other.any(), f"only one model has a gradient of {name}")
        else:
            ledger.error(f"gradient of {name}", float((grad - got).abs().max()) / scale)


def _refuses(s: Subject, ledger: Ledger, batch: Mapping[str, Any], **fields: Any) -> None:
    """Require a loss that is not made of those of micro-batches to be refused."""
    model = s.build()
    pipe: Any = shard(model, policy=s.policy(model), **fields)
    try:
        pipe.train_step(batch, loss=lambda out, _: s.loss(out))
    except ConfigError:
        ledger.true(True, "")
    else:
        ledger.failed("Supports says that its loss is not made of those of micro-batches (H11), but it did not raise")


def _rows(out: Any, rows: int, number: int, part: int) -> Any:
    """Return what an output of ``number`` parts, of ``rows`` each, has for one of them."""
    start, total = part * rows, number * rows
    return tree_map_only(Tensor, lambda t: t[start : start + rows] if t.ndim and t.size(0) == total else t, out)


def _joined(values: Sequence[Any], rows: int) -> Any:
    first = values[0]
    if isinstance(first, tuple | list):
        return type(first)(_joined(inner, rows) for inner in zip(*values, strict=True))
    return torch.cat(list(values)) if isinstance(first, Tensor) and first.ndim and first.size(0) == rows else first


def refuses_pipeline(s: Subject) -> None:
    """Trace the model, cut as finely as it can be.

    Raises:
        ShardcoreError: it cannot be cut.
    """
    model = s.build()
    cut = _finest(s, model)
    if cut is None:
        raise ShardcoreError("the model has no two blocks")
    _traced(s, model, cut)


def _finest(s: Subject, model: nn.Module) -> Cut | None:
    stages = s.plan(meta_copy(model)).stages
    if stages is None:
        raise ShardcoreError("the policy has no stages=Stages(...), which say where the model can be cut")
    blocks = sum(len(list(model.get_submodule(name).children())) for name in stages.lists)
    return Cut.of(model, stages, min(blocks, MOST_STAGES)) if blocks > 1 else None


def _traced(s: Subject, model: nn.Module, cut: Cut) -> list[tuple[dict[str, Any], Any]]:
    trace = StageTracer(model, cut, s.device)
    batches = [s.inputs(model, seed) for seed in range(_MICRO_BATCHES)]
    return [(batch, trace(batch, lambda out, _: s.loss(out))) for batch in batches]


def _compare(s: Subject, ledger: Ledger, cut: Cut) -> None:
    reference, models = s.build(), [s.build() for _ in range(len(cut))]
    if s.case.supports.checkpointing:
        for model in (reference, *models):
            checkpointing(model, {"use_reentrant": False})
    traced = _traced(s, s.build(), cut)
    made = [Stage(PrunedModel(model, cut, [index], s.device), index) for index, model in enumerate(models)]
    _held_once(ledger, reference, made)
    # Each of the stages has had all micro-batches before the backward of the first.
    flights = [_forward(made, batch, metadata) for batch, metadata in traced]
    for (batch, _), flight in zip(traced, flights, strict=True):
        wanted, got = s.loss(reference(**batch)), s.loss(flight[-1][1])
        ledger.close("loss", wanted, got)
        wanted.backward()
        _backward(got, flight)
    scale = max(float(p.grad.abs().max()) for p in reference.parameters() if p.grad is not None) or 1.0
    summed = _summed(reference, [stage.model for stage in made])
    for name, parameter in reference.named_parameters():
        grad, total = parameter.grad, summed.get(name)
        if grad is None:
            ledger.true(total is None or not total.any(), f"{name} has a gradient, and none in the whole model")
        else:
            total = torch.zeros_like(grad) if total is None else total
            ledger.error(f"gradient of {name}", float((grad - total).abs().max()) / scale)


def _held_once(ledger: Ledger, reference: nn.Module, made: Sequence[Stage]) -> None:
    """Require every parameter to be held, by as few stages as its names say, and what is held to have its values."""
    names = dict(reference.named_parameters(remove_duplicate=False))
    cut = made[0].cut
    for stage in made:
        for name, parameter in stage.model.named_parameters(remove_duplicate=False):
            ledger.true(torch.equal(parameter, names[name]), f"stage {stage.index} has other values of {name}")
            inside = cut.stages.holder(name)
            meant = inside is not None and cut.holder(inside) in (stage.index, None)
            tied = any(names[other] is names[name] for other in names if other != name)
            ledger.true(
                meant or tied, f"stage {stage.index} holds {name}, which is of stage {cut.holder(inside or '')}"
            )
    held = {name for stage in made for name, _ in stage.model.named_parameters(remove_duplicate=False)}
    ledger.true(held == set(names), f"no stage holds {sorted(set(names) - held)}")


def _forward(made: Sequence[Stage], batch: Mapping[str, Any], metadata: Any) -> list[tuple[list[Tensor], Any]]:
    """Run the stages in turn; return what arrived at each of them and what it made of that."""
    arrived: list[Tensor] = []
    flight = []
    for stage in made:
        out = stage(batch, arrived, metadata)
        flight.append((arrived, out))
        if not stage.is_last:
            arrived = [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in out]
    return flight


def _backward(loss: Tensor, flight: Sequence[tuple[list[Tensor], Any]]) -> None:
    loss.backward()
    for (arrived, _), (_, left) in zip(reversed(flight), reversed(flight[:-1]), strict=False):
        pairs = [
            (out, t.grad) for out, t in zip(left, arrived, strict=True) if t.grad is not None and out.requires_grad
        ]
        torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])


def _summed(reference: nn.Module, models: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return the gradients of all stages, by the name that the whole model has for a parameter; copies are summed."""
    first: dict[int, str] = {}
    name_of = {n: first.setdefault(id(p), n) for n, p in reference.named_parameters(remove_duplicate=False)}
    found: dict[str, Tensor] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                found[name_of[name]] = found.get(name_of[name], 0) + parameter.grad
    return found
