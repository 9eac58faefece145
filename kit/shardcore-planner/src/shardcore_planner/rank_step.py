"""What the stages of one rank of a pipeline take: two micro-batches of a step run on tensors that hold nothing.

The first micro-batch makes what is made once, such as gradients; what the second one takes, every further one takes.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardcore.fsdp.accumulation import Accumulation
from shardcore.mesh.context import context_of
from shardcore.pipeline import Pipeline, Stage, StageMetadata, micro_batches
from shardcore.pipeline.engine import pipeline_of
from shardcore.pipeline.torch_stage import StageModule
from shardcore_planner.simulation import Certain, holding_nothing
from shardcore_planner.sizing import resized
from shardcore_planner.step import Places, by_axis, follow, still, sum_partial, to_fake
from shardcore_planner.watch import KINDS, Numbers, Watch
from shardcore_planner.workload import Call, Stepper, Workload

Make = Callable[[nn.Module, Workload], Call]

_SHORT = 8  # tokens of a sample that finds out what crosses
_SEEN = 2  # micro-batches that run


def run_rank(model: Any, workload: Workload, call: Make, rows: int, places: Places) -> Numbers:
    """Run this rank's stages of a pipeline, twice, and return what was seen the second time.

    Args:
        model: the sharded model, on meta, of few blocks.
        workload: what the step is made of.
        call: says how a model is called.
        rows: of each micro-batch.
        places: blocks whose surroundings are told apart in the peaks, by what to call them.

    Returns:
        Bytes by ``("held", kind)``; ``("base", kind)``, of what lives before the step without buffers; by
        ``("change", action, kind)``, of what an action leaves alive, and ``("rise", action, place, kind)``, of what it
        takes at most; ``("arrives" or "leaves", position, "count" or "bytes")`` of a micro-batch, by the position of a
        stage among those of the rank; ``("sent", action, operation, axis, ranks, "count" or "bytes")``; and
        what `Watch.work` has, by action. Actions are ``"begin"``, ``"F0 0"`` (the forward of micro-batch 0 in the first
        stage of the rank) and the like, ``"finish"`` and ``"optimizer"``.
    """
    engine = pipeline_of(model)
    assert engine is not None  # the caller sharded it so
    context = context_of(model)
    if context is not None:
        still(context)
    model.train(workload.trains)
    metadata = metadata_of(model, workload, call, rows)
    with holding_nothing(workload.device) as fake:
        to_fake(model)
        run = _Run(model, engine, metadata, workload, call(model, workload))
        watch = Watch(fake, workload.card)
        found = run.watched(rows, watch, places)
    for position, stage in enumerate(engine.stages):
        found.update(_crossing(metadata, stage, str(position)))
    return by_axis(found, context)


def metadata_of(model: Any, workload: Workload, call: Make, rows: int) -> StageMetadata:
    """Return the metadata of micro-batches of so many rows: found out with a short one, then sized on meta.

    Args:
        model: a sharded model that is this rank's part of a pipeline.
        workload: what the step is made of.
        call: says how a model is called.
        rows: of each micro-batch.
    """
    engine = pipeline_of(model)
    assert engine is not None  # as above
    context = context_of(model)
    least = max(_SHORT, 2 * context.size) if context is not None else _SHORT
    tokens = None if workload.seq is None else min(workload.seq, least)
    short = call(model, dataclasses.replace(workload, batch=1, seq=tokens))
    loss = (lambda out, _: short.loss(out)) if workload.trains else None
    metadata = engine.tracer(arguments_of(model, short.inputs()), loss)
    with torch.device("meta"):
        whole = call(model, dataclasses.replace(workload, batch=rows)).inputs()
    with Certain():
        return resized(engine.tracer, metadata, arguments_of(model, whole))


def arguments_of(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by their names, of which the only positional one has none yet."""
    name = next(iter(inspect.signature(model.forward).parameters))
    return {name if given == "" else given: value for given, value in inputs.items()}


def _crossing(metadata: StageMetadata, stage: Stage, position: str) -> Numbers:
    """Return how much arrives at a stage, and how much leaves it, for a micro-batch."""
    found: Numbers = Counter()
    for end, receiver in (("arrives", stage.index), ("leaves", stage.index + 1)):
        values = metadata.sent(receiver)
        found[end, position, "count"] = len(values)
        found[end, position, "bytes"] = sum(value.nbytes for value in values)
    return found


class _Run:
    """The steps of one rank.

    Args:
        model: this rank's part, on fake tensors.
        engine: its pipeline.
        metadata: of the micro-batches.
        workload: what the step is made of.
        call: how the model is called with a whole batch.
    """

    def __init__(self, model: Any, engine: Pipeline, metadata: StageMetadata, workload: Workload, call: Call) -> None:
        self._model, self._engine, self._metadata, self._call = model, engine, metadata, call
        self._trains = workload.trains
        self._stepper = Stepper(model, workload)
        self._feed: list[dict[str, Any]] = []
        self._left: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        self._arrives = [self._buffers(stage.index, requires_grad=self._trains) for stage in engine.stages]
        self._returns = [self._buffers(stage.index + 1) if self._trains else [] for stage in engine.stages]

    def watched(self, rows: int, watch: Watch, places: Places) -> Numbers:
        """Run two steps, and return what was seen in the second."""
        self._feed = micro_batches(arguments_of(self._model, self._call.inputs()), size=rows)
        self._step(lambda _, do: do())
        watch.owns("parameters", self._model.parameters())
        watch.owns("optimizer", self._stepper.state())
        watch.finds_gradients(self._stepper.gradients)
        watch.owns("buffers", [t for some in (*self._arrives, *self._returns) for ts in some for t in ts])
        fed = [tensor for part in self._feed for tensor in tree_leaves(part) if isinstance(tensor, Tensor)]
        watch.owns("activations", [*self._model.buffers(), *fed])
        handles = [handle for name, block in places for handle in follow(watch, name, block)]
        found: Numbers = Counter()
        try:
            with watch:
                found.update({("base", kind): size for kind, size in watch.now().items()})
                self._step(lambda name, do: _seen(watch, found, name, do))
        finally:
            for handle in handles:
                handle.remove()
        found.update({("sent", *key): size for key, size in watch.sent.items()})
        found.update(watch.work)
        return found

    def _step(self, act: Callable[[str, Callable[[], None]], None]) -> None:
        positions, numbers = range(len(self._engine.stages)), range(min(_SEEN, len(self._feed)))
        accumulation = Accumulation(self._model)
        if self._trains:
            act("begin", accumulation.begin)
        with torch.set_grad_enabled(self._trains):
            for position, number in itertools.product(positions, numbers):
                act(f"F{number} {position}", functools.partial(self._forward, position, number))
        if not self._trains:
            self._left.clear()
            act("finish", accumulation.divide)
            return
        for position, number in itertools.product(reversed(positions), numbers):
            act(f"B{number} {position}", functools.partial(self._backward, position, number))
        act("finish", functools.partial(self._finish, accumulation))
        act("optimizer", self._stepper.step)

    def _forward(self, position: int, number: int) -> None:
        stage = self._engine.stages[position]

        def run(micro_batch: int, arrived: list[Tensor]) -> tuple[Tensor, ...]:
            self._engine.running += 1
            try:
                out = stage(self._feed[micro_batch], arrived, self._metadata)
            finally:
                self._engine.running -= 1
            if not stage.is_last:
                return tuple(out)
            return (self._call.loss(out) * (1 / len(self._feed)),) if self._trains else ()

        arrived = self._arrives[position][number] if stage.index else []
        left = StageModule(run, stage.parameters, begins=not stage.index)(*arrived, number=number)
        if self._trains or len(self._engine.stages) > 1:  # else it is gone when it was sent
            self._left[position, number] = left

    def _backward(self, position: int, number: int) -> None:
        left = self._left.pop((position, number))
        if self._engine.stages[position].is_last:
            torch.autograd.backward(left)
        else:
            pairs = zip(left, self._returns[position][number], strict=True)
            given = [(tensor, gradient) for tensor, gradient in pairs if tensor.requires_grad]
            torch.autograd.backward([tensor for tensor, _ in given], [gradient for _, gradient in given])
        for tensor in self._arrives[position][number] if self._arrives[position] else ():
            tensor.grad = None  # which is sent

    def _finish(self, accumulation: Accumulation) -> None:
        accumulation.finish()
        sum_partial(self._model)
        self._engine.shared.add(self._engine.ranks.group)

    def _buffers(self, receiver: int, *, requires_grad: bool = False) -> list[list[Tensor]]:
        """Return what receives what is sent to a stage, for the micro-batches that run."""
        values = self._metadata.sent(receiver)
        return [
            [torch.empty(v.shape, dtype=v.dtype, requires_grad=requires_grad and v.requires_grad) for v in values]
            for _ in range(_SEEN)
        ]


def _seen(watch: Watch, found: Numbers, name: str, do: Callable[[], None]) -> None:
    """Do an action of a step under watch, and note what it takes and leaves."""
    watch.phase, watch.place = name, ""
    before = watch.now()
    do()
    after = watch.now()
    kinds = (*KINDS, "all")
    found.update({("change", name, kind): after[kind] - before[kind] for kind in kinds})
    for place in {key[1] for key in watch.peaks if key[0] == name}:
        found.update({("rise", name, place, kind): watch.peaks[name, place, kind] - before[kind] for kind in kinds})
    if name == "finish":
        found.update({("held", kind): after[kind] for kind in KINDS[:3]})
