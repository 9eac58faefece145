"""A model over the ranks of a pipeline: its schedule, losses, shared parameters, and one error on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shardcore.config import ShardConfig
from shardcore.errors import ConfigError
from shardcore.fsdp.accumulation import Accumulation
from shardcore.mesh import Division, ShardContext, set_division
from shardcore.mesh.random_stream import mix
from shardcore.nn.partial import reduce_partial_gradients
from shardcore.pipeline.batches import contents_of, micro_batches, shapes_of, with_labels
from shardcore.pipeline.forward import forward_only
from shardcore.pipeline.items import shares_of
from shardcore.pipeline.norms import clip_grads, squared_norm
from shardcore.pipeline.outputs import Outputs
from shardcore.pipeline.ranks import Ranks
from shardcore.pipeline.safe import Chunk, SafeStage
from shardcore.pipeline.schedules import SCHEDULES
from shardcore.pipeline.script import Script, Value
from shardcore.pipeline.scripts import Scripts
from shardcore.pipeline.shared import shared_parameters
from shardcore.pipeline.stage import Holding, Stage
from shardcore.pipeline.steps import Fed, Loss, Run, Step, Weight, own_loss
from shardcore.plan.cut import Cut

__all__ = ["Batch", "Pipeline"]

#: The arguments of a call by name; or what gives them, so that what fails there fails on all ranks.
Batch: TypeAlias = Mapping[str, Any] | Callable[[], Mapping[str, Any]]

_KEPT = 2  # schedules for calls of other shapes: each holds what receives every micro-batch of a step


class Pipeline:
    """Runs the micro-batches of a model whose blocks are divided among ranks.

    Each rank keeps the parameters of its stages, under the names that they have in the model; the others have no memory
    any more. After `torch.distributed.pipelining`, which has the schedules.

    Args:
        model: the whole model, sharded along ``tp``; it becomes this rank's part.
        cut: where it is cut.
        context: that of the model; its mesh has an axis ``pp``.
        config: the configuration, resolved.
        dtype: in which it will compute, where FSDP2 will cast.

    Attributes:
        model: this rank's part.
        cut: where it is cut.
        ranks: this rank's place among those of the pipeline.
        stages: the stages of this rank.
        shared: what other ranks of the pipeline hold too.
        scripts: finds out what crosses from stage to stage.
        running: how many stages are running.
    """

    def __init__(
        self,
        model: nn.Module,
        cut: Cut,
        context: ShardContext,
        config: ShardConfig,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.model, self.cut, self.ranks = model, cut, Ranks(context)
        self._context, self._device = context, context.device
        self._plan = SCHEDULES[config.pipeline_schedule or "1f1b"]
        self._size = config.microbatch_size
        self._number = None if self._size is not None else config.num_microbatches or 2 * self.ranks.size
        self._of = self._plan.ranks(len(cut), self.ranks.size)
        self.scripts = Scripts(model, cut, self._device, dtype)
        self.shared = shared_parameters(model, cut, self._of)
        set_division(model, _division(model, self.ranks.rank))
        # The context defers them for the sake of the schedule, not of the user.
        self._sums_partial = context.defers and config.partial_gradients == "in_backward"
        held = [stage for stage, of in enumerate(self._of) if of == self.ranks.rank]
        holding = Holding(model, cut, held, self._device, dtype)
        self.stages = [Stage(holding, index, splits=self._plan.splits) for index in holding.stages]
        self._schedules: dict[str, tuple[Any, list[SafeStage], int]] = {}
        self._step: Step | None = None
        self.running = 0

    def train_step(
        self,
        batch: Batch,
        *,
        loss: Loss | None = None,
        weight: Weight | None = None,
        outputs: list[Any] | None = None,
        everywhere: bool = False,
    ) -> Tensor:
        """Run forward and backward of a batch; see `shardcore.pipeline.PipelinedModel.train_step`."""
        return self._stepped(batch, loss, weight, outputs, everywhere=everywhere, training=True)

    def eval_step(
        self,
        batch: Batch,
        *,
        loss: Loss | None = None,
        weight: Weight | None = None,
        outputs: list[Any] | None = None,
        everywhere: bool = False,
    ) -> Tensor:
        """Return the loss of a batch, without a backward; see `shardcore.pipeline.PipelinedModel.eval_step`."""
        with torch.no_grad():
            return self._stepped(batch, loss, weight, outputs, everywhere=everywhere, training=False)

    @torch.no_grad()
    def forward(self, arguments: Mapping[str, Any]) -> Any:
        """Return the output of the whole model, on every rank of the pipeline, without gradients."""
        found: list[Any] = []
        step = self._begun(arguments, None, None, training=False, whole=True)
        try:
            self.ranks.agree(self._evaluated(step, lambda out, _: found.append(out)))
        finally:
            self._step = None
            Accumulation(self.model).end_evaluation()
        script = step.feed[0].run.script
        return Outputs(self.ranks, self._of[-1], self._context).shared(found[0] if found else None, script)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients by one norm; see `shardcore.pipeline.PipelinedModel.clip_grad_norm_`."""
        squares = squared_norm(self.model.named_parameters(), self.counted_elsewhere(), self.ranks.beside, self._device)
        dist.all_reduce(squares, group=self.ranks.everybody)
        norm = squares.sqrt()
        clip_grads(self.model, norm, max_norm)
        return norm

    def counted_elsewhere(self) -> set[int]:
        """Return the ids of parameters whose gradients count as those of another rank."""
        return self.shared.counted_elsewhere(self.ranks.rank)

    def _stepped(
        self,
        batch: Batch,
        loss: Loss | None,
        weight: Weight | None,
        outputs: list[Any] | None,
        *,
        everywhere: bool,
        training: bool,
    ) -> Tensor:
        step = self._begun(batch, loss, weight, training=training)
        step.outputs = {} if outputs is not None and self.stages[-1].is_last else None
        accumulation = Accumulation(self.model)
        kept = self._set_aside() if training else {}
        try:
            self.ranks.agree(self._trained(step, accumulation) if training else self._evaluated(step, self._add_loss))
        except BaseException:
            if training:
                accumulation.give_up()  # what there is of gradients is part of a step that never was
            raise
        finally:
            self._step = None
            if not training:
                accumulation.end_evaluation()
        if training:
            accumulation.finish()
            if self._sums_partial:
                reduce_partial_gradients(self.model)
            self.shared.add(self.ranks.group)
            self._add(kept)
        if outputs is not None:
            outputs += self._outputs(step, everywhere=everywhere)
        total = torch.stack(step.losses).sum() if step.losses else torch.zeros((), dtype=step.dtype)
        total = total.to(self._device)
        dist.broadcast(total, group=self.ranks.group, group_src=self._of[-1])
        return total

    def _outputs(self, step: Step, *, everywhere: bool) -> Iterator[Any]:
        """Yield the outputs of all micro-batches, on the ranks that are to have them."""
        for number, fed in enumerate(step.feed):
            own = None if step.outputs is None else step.outputs[number]
            if everywhere:
                yield Outputs(self.ranks, self._of[-1], self._context).shared(own, fed.run.script)
            elif own is not None:
                yield own

    def _set_aside(self) -> dict[str, Tensor]:
        """Take away gradients that are sums over ranks already, where those of this step will be summands at first."""
        summed = self.shared.names() if not self._sums_partial else None
        if summed == set():
            return {}
        kept = {}
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None and (summed is None or name in summed):
                kept[name], parameter.grad = parameter.grad, None
        return kept

    def _add(self, kept: Mapping[str, Tensor]) -> None:
        for name, parameter in self.model.named_parameters() if kept else ():
            if name in kept:
                parameter.grad = kept[name] if parameter.grad is None else kept[name] + parameter.grad

    def _begun(
        self, batch: Batch, loss: Loss | None, weight: Weight | None, *, training: bool, whole: bool = False
    ) -> Step:
        """Divide a batch, find out what crosses, and make sure that all ranks of the pipeline were given the same."""
        failure: BaseException | None = None
        told: list[tuple[str, str]] = []
        number = self._context.random.number()  # on every rank, whatever fails there
        try:
            given = batch() if callable(batch) else batch
            parts = micro_batches(given, number=1 if whole else self._number, size=None if whole else self._size)
            of = loss or own_loss
            made = None if whole else of
            runs = self.scripts.runs(parts, made)
            shares = [1.0] if whole else self._shares(parts, runs, weight)
            if training:
                parts = [part if share else with_labels(part) for part, share in zip(parts, shares, strict=True)]
            feed = [Fed(arguments=p, share=s, run=run) for p, s, run in zip(parts, shares, runs, strict=True)]
            self._step = Step(feed, of)
            if training:
                for run in self._step.runs:
                    self._scheduled(run)
            told = [
                ("the shapes of the batch", shapes_of(given)),
                ("the items of its micro-batches", str(shares)),
                *contents_of(given),
            ]
        except BaseException as error:
            failure = error
        number = self.ranks.begin(failure, told, number)
        assert self._step is not None  # for the type: without a failure there is one
        self._step.seed = self._context.seed_of(number)
        return self._step

    def _shares(self, parts: Sequence[Mapping[str, Any]], runs: Sequence[Run], weight: Weight | None) -> list[float]:
        if weight is None:
            forms = [form for run in dict.fromkeys(runs) for form in run.script.forms]
            told = [form for form in forms if form.shifted is not None]  # of others no label counts
            return shares_of(told or forms, parts, type(self.model).__name__)
        weights = [weight(part) for part in parts]
        return [each / (sum(weights) or 1.0) for each in weights]

    def _trained(self, step: Step, accumulation: Accumulation) -> BaseException | None:
        """Run the schedules; return the first exception of this rank."""
        accumulation.begin()
        failures: list[BaseException | None] = []
        for run in step.runs:  # all of them, whatever fails: other ranks do the same
            schedule, stages, count = self._scheduled(run)
            for stage in stages:
                stage.failure = None
            numbers = torch.tensor(run.numbers(count), device=self._device)
            first = (numbers,) if self._of[0] == self.ranks.rank else ()
            target = {"target": numbers} if self._of[-1] == self.ranks.rank else {}
            schedule.step(*first, number=numbers, return_outputs=False, **target)
            failures += [stage.failure for stage in stages]
        return next((failure for failure in failures if failure is not None), None)

    def _evaluated(self, step: Step, take: Callable[[Any, int], Any]) -> BaseException | None:
        """Run all forwards; ``take`` gets outputs and numbers of micro-batches. Return the first exception here."""
        stages = {stage.index: stage for stage in self.stages}

        def run(stage: int, number: int, arrived: list[Tensor]) -> tuple[Tensor, ...]:
            out = self._run(stages[stage], number, arrived)
            if not stages[stage].is_last:
                return tuple(out)
            take(out, number)
            return ()

        failures = [
            forward_only(run, some, ranks=self._of, group=self.ranks.group, device=self._device) for some in step.runs
        ]
        return next((failure for failure in failures if failure is not None), None)

    def _add_loss(self, out: Any, number: int) -> None:
        self._loss(self.stages[-1], out, number)

    def _scheduled(self, run: Run) -> tuple[Any, list[SafeStage], int]:
        """Return the schedule for micro-batches as there are now, its stages, and how many it runs."""
        key = f"{run.count} {run.key}"
        found = self._schedules.pop(key, None)
        if found is None:
            while len(self._schedules) >= _KEPT:
                del self._schedules[next(iter(self._schedules))]
            found = self._made(run)
        self._schedules[key] = found  # the last one used is the last
        return found

    def _made(self, run: Run) -> tuple[Any, list[SafeStage], int]:
        stages = [self._safe(stage, run.script) for stage in self.stages]
        most = run.count if run.count == self._number != 1 else run.count + 2 * len(self.cut)
        for count in range(run.count, most + 1):
            try:
                return self._plan.make(stages, count, _the_loss_itself), stages, count
            except ValueError as error:  # it may run more of them: fillers
                failure = error
        raise ConfigError(
            f"{self._plan.name} of torch cannot run {run.count} micro-batches through {len(self.cut)} stages: "
            f"{failure}; use another num_microbatches"
        ) from failure

    def _safe(self, stage: Stage, script: Script) -> SafeStage:
        def run(number: int, arrived: list[Tensor]) -> tuple[Tensor, ...]:
            out = self._run(stage, number, arrived)
            return (self._loss(stage, out, number),) if stage.is_last else tuple(out)

        number = Value((1,), torch.int64)
        arrives = script.crossings[stage.index - 1].values if stage.index else (number,)
        loss = script.loss or Value((), torch.get_default_dtype())
        leaves = (Value((), loss.dtype),) if stage.is_last else script.crossings[stage.index].values
        chunk = Chunk(run, stage.parameters)
        return SafeStage(chunk, stage.index, len(self.cut), (arrives, leaves), self._device, self.ranks.group)

    def _run(self, stage: Stage, number: int, arrived: list[Tensor]) -> Any:
        """Run a stage for the micro-batch of a number; return what leaves it, or of the last one the output.

        Each block draws from a stream that follows from its number and that of the micro-batch, so that what is drawn
        depends neither on the schedule nor on where the model is cut.
        """
        step = self._now
        random = self._context.random
        kept = random.state()
        first = (number if number >= 0 else ~number) * (len(self.cut.blocks) + 1)
        random.seed(mix(step.seed, first))
        self.running += 1
        try:
            return stage(
                step[number].arguments,
                arrived,
                step[number].run.script,
                lambda block: random.seed(mix(step.seed, first + 1 + block)),
            )
        finally:
            self.running -= 1
            random.load(kept)

    def _loss(self, stage: Stage, out: Any, number: int) -> Tensor:
        """Return the part that a micro-batch has in the loss, from the output of the last stage."""
        step = self._now
        arguments, share = step[number].arguments, step[number].share if number >= 0 else 0.0
        if step.outputs is not None and number >= 0:
            step.outputs[number] = tree_map_only(Tensor, Tensor.detach, out)
        # Also without a share: its backward goes the way of others, on which FSDP2 gathers, and other replicas wait.
        loss = step.loss(out, arguments) * share
        if torch.is_grad_enabled() and not loss.requires_grad:
            if share:
                raise ConfigError(
                    f"the loss of {type(self.model).__name__} has no gradient: it was detached, is no number that can "
                    "have one, or nothing of the model is trained; for a loss alone call eval_step(batch)"
                )
            loss.requires_grad_()  # a schedule goes backwards in any case
        if share:  # a mean over nothing is NaN
            step.losses.append(loss.detach())
        return loss

    @property
    def is_running(self) -> bool:
        """Whether a stage is running, so that calls of the model are its own."""
        return self.running > 0

    @property
    def _now(self) -> Step:
        assert self._step is not None  # stages run in a step only
        return self._step


def _division(model: nn.Module, position: int) -> Division:
    """Return what every rank has to know of the whole ``model`` when it has lost the rest."""
    first: dict[int, str] = {}
    names = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (known := first.setdefault(id(parameter), name)) != name:
            names[name] = known
    return Division(position=position, names=frozenset(model.state_dict(keep_vars=True)), first_names=names)


def _the_loss_itself(left: tuple[Tensor, ...], target: Tensor) -> Tensor:
    return left[0]  # torch takes no backward of a tuple without gradients
