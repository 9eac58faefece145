"""A model over the ranks of a pipeline: its schedule, losses, shared parameters, and one error on all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shardcore.config import ShardConfig
from shardcore.errors import ConfigError, NotSupportedError
from shardcore.fsdp.accumulation import Accumulation
from shardcore.mesh.context import Division, ShardContext, set_division
from shardcore.mesh.random_stream import mix
from shardcore.nn.partial import reduce_partial_gradients
from shardcore.pipeline.losses import Loss, Weight, own_loss, shares_of, wide
from shardcore.pipeline.metadata import StageMetadata, form_of
from shardcore.pipeline.microbatches import contents_of, micro_batches, shapes_of, with_labels
from shardcore.pipeline.ranks import PipelineRanks
from shardcore.pipeline.schedules import SCHEDULES, forward_only
from shardcore.pipeline.shared import SharedParameters
from shardcore.pipeline.stage import PrunedModel, Stage
from shardcore.pipeline.steps import MicrobatchGroup, PipelineStep, groups_of
from shardcore.pipeline.torch_stage import SafeStage, StageModule
from shardcore.pipeline.tracing import StageTracer
from shardcore.plan.cut import Cut

#: The arguments of a call by name; or what gives them, so that what fails there fails on all ranks.
Batch: TypeAlias = Mapping[str, Any] | Callable[[], Mapping[str, Any]]

_PIPELINE = "_shardcore_pipeline"  # on a model: which pipeline it is this rank's part of

_KEPT = 2  # schedules for calls of other shapes: each holds what receives every micro-batch of a step


def pipeline_of(model: nn.Module) -> Pipeline | None:
    """Return the pipeline that a model is this rank's part of; None if it is no part of any."""
    return model.__dict__.get(_PIPELINE)


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
        tracer: finds out what crosses from stage to stage.
        running: how many stages are running, whose calls of the model are their own.
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
        self.model, self.cut, self.ranks = model, cut, PipelineRanks(context)
        self._context, self._device = context, context.device
        self._schedule = SCHEDULES[config.pipeline_schedule or "1f1b"]
        self._size = config.microbatch_size
        self._number = None if self._size is not None else config.num_microbatches or 2 * self.ranks.size
        self._of = self._schedule.ranks(len(cut), self.ranks.size)
        self.tracer = StageTracer(model, cut, self._device, dtype, fp8=config.fp8_communication)
        self.shared = SharedParameters.of(model, cut, self._of)
        set_division(model, _division(model, self.ranks.rank))
        # The context defers them for the sake of the schedule, not of the user.
        self._sums_partial = context.defers and config.partial_gradients == "in_backward"
        held = [stage for stage, of in enumerate(self._of) if of == self.ranks.rank]
        pruned = PrunedModel(model, cut, held, self._device, dtype)
        self.stages = [Stage(pruned, index, splits=self._schedule.splits) for index in held]
        self._schedules: dict[str, tuple[Any, list[SafeStage], int]] = {}
        self._step: PipelineStep | None = None
        self.running = 0
        kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
        self._batch_norms = [module for module in model.modules() if isinstance(module, kinds)]  # of all stages
        model.__dict__[_PIPELINE] = self

    def step(
        self,
        batch: Batch,
        *,
        training: bool,
        loss: Loss | None = None,
        weight: Weight | None = None,
        scale: float = 1.0,
        outputs: list[Any] | None = None,
        everywhere: bool = False,
    ) -> Tensor:
        """Run a batch, with ``training`` its backward too, and return its loss, multiplied with ``scale``.

        The other arguments are those of `PipelinedModel.train_step`; ``batch`` may be what returns the batch.
        """
        step = self._begun(batch, loss or own_loss, weight, training=training)
        step.scale = scale
        step.outputs = {} if outputs is not None and self.stages[-1].is_last else None
        if training:
            self._train(step)
        else:
            self._evaluate(step)
        if outputs is not None:
            outputs += self._outputs(step, everywhere=everywhere)
        total = torch.zeros((), dtype=step.groups[0].metadata.loss, device=self._device)
        if step.losses:
            total = torch.stack(step.losses).sum().to(self._device)
        dist.broadcast(total, group=self.ranks.group, group_src=self._of[-1])
        return total

    @torch.no_grad()
    def forward(self, arguments: Mapping[str, Any]) -> Any:
        """Return the output of the whole model, on every rank of the pipeline, without gradients."""
        step = self._begun(arguments, None, None, training=False)
        step.outputs = {}
        self._evaluate(step)
        return next(self._outputs(step, everywhere=True))

    def _begun(self, batch: Batch, loss: Loss | None, weight: Weight | None, *, training: bool) -> PipelineStep:
        """Divide a batch, find out what crosses, and make sure that all ranks of the pipeline were given the same.

        Without a loss the batch is one micro-batch.
        """
        failure: BaseException | None = None
        told: list[tuple[str, str]] = []
        step = PipelineStep(loss=loss)
        number = self._context.random.number()  # on every rank, whatever fails there
        try:
            if training and not torch.is_grad_enabled():
                raise NotSupportedError(
                    "train_step was called where gradients are off (torch.no_grad, torch.inference_mode), so that it "
                    "could train nothing: call it outside of them, or eval_step(batch) for the loss alone"
                )
            given = batch() if callable(batch) else batch
            division = {"number": 1} if loss is None else {"number": self._number, "size": self._size}
            step.parts = parts = micro_batches(given, **division)
            self._expect_whole_batch(len(parts))
            step.groups = groups_of(self.tracer.forms(parts, loss))
            step.shares = [1.0] if loss is None else self._shares(step, weight)
            if training:
                step.parts = [p if share else with_labels(p) for p, share in zip(parts, step.shares, strict=True)]
                for group in step.groups:
                    self._scheduled(group)
            told = [
                ("the shapes of the batch", shapes_of(given)),
                ("the items of its micro-batches", str(step.shares)),
                *contents_of(given),
            ]
        except BaseException as error:
            failure = error
        step.seed = self._context.seed_of(self.ranks.begin(failure, told, number))
        return step

    def _expect_whole_batch(self, parts: int) -> None:
        norms = [norm for norm in self._batch_norms if norm.training or not norm.track_running_stats]
        if norms and parts > 1:
            raise NotSupportedError(
                f"{len(norms)} norms of {type(self.model).__name__} ({type(norms[0]).__name__}) use the statistics of "
                f"a batch, and would use those of each of {parts} micro-batches: run the batch as one "
                "(num_microbatches=1), or set the norms to evaluation (norm.eval())"
            )

    def _shares(self, step: PipelineStep, weight: Weight | None) -> list[float]:
        if weight is None:
            reductions = [one for group in step.groups for one in group.metadata.reductions]
            known = [one for one in reductions if one.shifted is not None]  # of others no label counts
            return shares_of(known or reductions, step.parts, type(self.model).__name__)
        weights = [weight(part) for part in step.parts]
        return [each / (sum(weights) or 1.0) for each in weights]

    def _train(self, step: PipelineStep) -> None:
        """Run the schedules, and let all ranks have their gradients; if one of them fails, nobody has any."""
        accumulation = Accumulation(self.model)
        kept = self._set_aside()
        self._step = step
        try:
            accumulation.begin()
            failures: list[BaseException | None] = []
            for group in step.groups:  # all of them, whatever fails: other ranks do the same
                schedule, stages, count = self._scheduled(group)
                for stage in stages:
                    stage.failure = None
                numbers = torch.tensor(group.numbers(count), device=self._device)
                first = (numbers,) if self._of[0] == self.ranks.rank else ()
                target = {"target": numbers} if self._of[-1] == self.ranks.rank else {}
                schedule.step(*first, number=numbers, return_outputs=False, **target)
                failures += [stage.failure for stage in stages]
            self.ranks.agree(_first(failures))
        except BaseException:
            accumulation.give_up()  # what there is of gradients is part of a step that never was
            raise
        finally:
            self._step = None
        accumulation.finish()
        if self._sums_partial:
            reduce_partial_gradients(self.model)
        self.shared.add(self.ranks.group)
        for name, parameter in self.model.named_parameters() if kept else ():
            if name in kept:
                parameter.grad = kept[name] if parameter.grad is None else kept[name] + parameter.grad

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

    def _evaluate(self, step: PipelineStep) -> None:
        """Run all forwards."""
        accumulation = Accumulation(self.model)
        accumulation.hold()
        self._step = step
        try:
            failures = [
                forward_only(
                    self._run,
                    self.stages,
                    group.numbers(group.count),
                    group.metadata,
                    ranks=self._of,
                    group=self.ranks.group,
                    device=self._device,
                )
                for group in step.groups
            ]
            self.ranks.agree(_first(failures))
        finally:
            self._step = None
            accumulation.divide()

    def _outputs(self, step: PipelineStep, *, everywhere: bool) -> Iterator[Any]:
        """Yield the outputs of all micro-batches, on the ranks that are to have them."""
        for group in step.groups:
            for number in group.numbers(group.count):
                own = None if step.outputs is None else step.outputs.get(number)
                if everywhere:
                    yield self.ranks.broadcast(own, self._of[-1], group.metadata.missing)
                elif own is not None:
                    yield own

    def _scheduled(self, group: MicrobatchGroup) -> tuple[Any, list[SafeStage], int]:
        """Return the schedule for micro-batches as there are now, its stages, and how many it runs."""
        key = f"{group.count} {group.key}"
        found = self._schedules.pop(key, None)
        if found is None:
            while len(self._schedules) >= _KEPT:
                del self._schedules[next(iter(self._schedules))]
            found = self._made(group)
        self._schedules[key] = found  # the last one used is the last
        return found

    def _made(self, group: MicrobatchGroup) -> tuple[Any, list[SafeStage], int]:
        stages = [self._safe(stage, group.metadata) for stage in self.stages]
        most = group.count if group.count == self._number != 1 else group.count + 2 * len(self.cut)
        for count in range(group.count, most + 1):
            try:
                # Of what leaves the last stage, its loss: torch takes no backward of a tuple without gradients.
                return self._schedule.make(stages, count, lambda left, target: left[0]), stages, count
            except ValueError as error:  # it may run more of them: fillers
                failure = error
        raise ConfigError(
            f"{self._schedule.name} of torch cannot run {group.count} micro-batches through {len(self.cut)} stages: "
            f"{failure}; use another num_microbatches"
        ) from failure

    def _safe(self, stage: Stage, metadata: StageMetadata) -> SafeStage:
        number = torch.empty(1, dtype=torch.int64, device="meta")
        arrives = metadata.sent(stage.index) or (number,)
        loss = form_of(torch.empty((), dtype=metadata.loss))
        leaves = (loss,) if stage.is_last else metadata.sent(stage.index + 1)
        module = StageModule(functools.partial(self._run, stage, metadata), stage.parameters, begins=stage.index == 0)
        return SafeStage(module, stage.index, len(self.cut), arrives, leaves, self._device, self.ranks.group)

    def _run(self, stage: Stage, metadata: StageMetadata, number: int, arrived: list[Tensor]) -> tuple[Tensor, ...]:
        """Run a stage for the micro-batch of a number; return what leaves it, of the last one the loss if there is one.

        Each block draws from a stream that follows from its number and that of the micro-batch, so that what is drawn
        depends neither on the schedule nor on where the model is cut.
        """
        step, random = self._step, self._context.random
        assert step is not None  # stages run in a step only
        kept, filler = random.state(), number < 0
        number = ~number if filler else number
        arguments, first = step.parts[number], number * (len(self.cut.blocks) + 1)
        random.seed(mix(step.seed, first))
        self.running += 1
        statistics = [b for norm in self._batch_norms if filler for b in norm.buffers(recurse=False) if not b.is_meta]
        before = [statistic.clone() for statistic in statistics]
        try:
            out = stage(arguments, arrived, metadata, lambda block: random.seed(mix(step.seed, first + 1 + block)))
        finally:
            for statistic, was in zip(statistics, before, strict=True):
                statistic.data.copy_(was)  # with the version that backwards expect
            self.running -= 1
            random.load(kept)
        if not stage.is_last:
            return tuple(out)
        if step.outputs is not None and not filler:
            step.outputs[number] = tree_map_only(Tensor, Tensor.detach, out)
        if step.loss is None:
            return ()
        return (self._loss(step, 0.0 if filler else step.shares[number], step.loss(out, arguments)),)

    def _loss(self, step: PipelineStep, share: float, loss: Tensor) -> Tensor:
        """Return the part that a micro-batch has in the loss of the batch."""
        # Also without a share: its backward goes the way of others, on which FSDP2 gathers, and other replicas wait.
        loss = wide(loss) * (step.scale * share)
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


def _first(failures: Sequence[BaseException | None]) -> BaseException | None:
    return next((failure for failure in failures if failure is not None), None)


def _division(model: nn.Module, position: int) -> Division:
    """Return what every rank has to know of the whole ``model`` when it has lost the rest."""
    first: dict[int, str] = {}
    names = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (known := first.setdefault(id(parameter), name)) != name:
            names[name] = known
    return Division(position=position, names=frozenset(model.state_dict(keep_vars=True)), first_names=names)
