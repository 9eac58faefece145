"""A model over the ranks of a pipeline: its schedule, losses, shared parameters, and one error on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardcore.agree.agreement import Report, agree
from shardcore.agree.fingerprint import model_items, tensor_items, training_modes
from shardcore.apply.sharder import ModelSharder
from shardcore.config import ShardConfig
from shardcore.errors import ConfigError, NotSupportedError
from shardcore.mesh import device_type_of
from shardcore.mesh.meshes import default_group
from shardcore.mesh.random_stream import RandomStream, mix
from shardcore.nn.copies import meta_copy
from shardcore.pipeline.batches import contents_of, micro_batches, shapes_of, weight_of
from shardcore.pipeline.cut import Cut
from shardcore.pipeline.forward import forward_only
from shardcore.pipeline.rehearsal import Rehearsal
from shardcore.pipeline.safe import Chunk, SafeStage
from shardcore.pipeline.schedules import schedule_named
from shardcore.pipeline.script import Script, Value
from shardcore.pipeline.shared import shared_parameters
from shardcore.pipeline.stage import Holding, Stage
from shardcore.plan.stages import Stages
from shardcore.policy import Policy

__all__ = ["Pipeline"]

_KEPT = 2  # schedules for calls of other shapes: each holds what receives every micro-batch of a step


class Pipeline:
    """Trains a model whose blocks are divided among the ranks of a process group.

    Each rank keeps the parameters of its stages, under the names that they have in the model; the others have no memory
    any more. After `torch.distributed.pipelining`, which has the schedules.

    Args:
        model: the whole model, the same on every rank; it becomes this rank's part.
        policy: says where it can be cut (`shardcore.Policy.stages`); by default that of an installed pack.
        group: the ranks; the default process group if not given.
        schedule: ``"gpipe"``, ``"1f1b"``, ``"interleaved"``, ``"looped_bfs"``, ``"interleaved_zero_bubble"``,
            ``"zbv"`` or ``"dualpipev"``.
        num_model_chunks: stages of each rank; by default 2 where the schedule has several, else 1.
        num_microbatches: micro-batches of a batch; by default 2 for each rank.
        microbatch_size: rows of each, in place of their number.
        loss: returns the loss of the model's output and the arguments of its call, a mean over as many items as
            ``weight`` says; by default what the output calls ``loss``.
        weight: returns over how many items the loss of a micro-batch is a mean; by default labels that count
            (`shardcore.pipeline.weight_of`), or rows.
        bounds: the numbers of the blocks at which stages begin, and how many blocks there are; by default work is even.

    Raises:
        AgreementError: the ranks do not hold the same model, or the same settings.
        ConfigError: the model has too few blocks, or settings contradict each other.
        NotSupportedError: the policy does not say where the model can be cut.
        PlanError: the policy does not fit the model.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: Policy | type[Policy] | None = None,
        *,
        group: ProcessGroup | None = None,
        schedule: str = "1f1b",
        num_model_chunks: int | None = None,
        num_microbatches: int | None = None,
        microbatch_size: int | None = None,
        loss: Callable[[Any, Mapping[str, Any]], Tensor] | None = None,
        weight: Callable[[Mapping[str, Any]], float] | None = None,
        bounds: Sequence[int] | None = None,
    ) -> None:
        self.group = group or default_group()
        self.rank, ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self._device = torch.device(device_type_of(self.group))
        failure: Exception | None = None
        own = Report()
        try:
            if num_microbatches is not None and microbatch_size is not None:
                raise ConfigError("give num_microbatches or microbatch_size, not both")
            self._plan, chunks = schedule_named(schedule, num_model_chunks)
            self.cut = Cut.of(model, _stages_of(model, policy), ranks * chunks, bounds=bounds)
            about, values = tensor_items(model)
            settings = {"schedule": schedule, "num_microbatches": num_microbatches, "microbatch_size": microbatch_size}
            items = [*model_items(model), *training_modes(model), ("Pipeline(bounds=)", str(self.cut.bounds))]
            items += [(f"Pipeline({name}=)", str(value)) for name, value in settings.items()]
            own = Report(items=(*items, *about, *values), seed=torch.initial_seed())
        except Exception as error:
            failure, own = error, Report.of_error(error)
        seed = agree(own, failure, group=self.group)[0].seed
        self._number = None if microbatch_size is not None else num_microbatches or 2 * ranks
        self._size, self._loss = microbatch_size, loss or _loss_of
        self._ranks = self._plan.ranks(len(self.cut), ranks)
        self._rehearsal = Rehearsal(meta_copy(model), self.cut, self._device)
        self._shared = shared_parameters(model, self.cut, self._ranks)
        holding = Holding(model, self.cut, [s for s, of in enumerate(self._ranks) if of == self.rank], self._device)
        self._stages = [Stage(holding, index, splits=self._plan.splits) for index in holding.stages]
        self._random = {stage: RandomStream(mix(seed, stage), 0, self._device, forks=False) for stage in holding.stages}
        self.model = model
        self._weight = weight or (lambda batch: weight_of(model, batch))
        self._scripts: dict[str, Script] = {}
        self._schedules: dict[str, tuple[Any, list[SafeStage]]] = {}
        self._feed: list[tuple[dict[str, Any], float]] = []
        self._key = ""
        self._losses: list[Tensor] = []

    def train_step(self, batch: Mapping[str, Any]) -> Tensor:
        """Run forward and backward of a batch, and return its loss: on every rank that of the whole batch.

        Gradients are added to those that the parameters have. Every rank is given the same batch.

        Raises:
            AgreementError: another rank failed, or the batches differ.
        """
        return self._step(batch, training=True)

    def eval_step(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the loss of a batch on every rank, without a backward."""
        with torch.no_grad():
            return self._step(batch, training=False)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients, on all ranks, so that their norm is at most ``max_norm``; return the norm before.

        It is the norm of the whole model: of a parameter that several ranks hold the first one counts. Every rank makes
        the call.
        """
        again = self._shared.counted_elsewhere(self.rank)
        grads = {id(p): p.grad for p in self.model.parameters() if p.grad is not None}
        squares = [grad.double().square().sum() for own, grad in grads.items() if own not in again]
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=self._device)
        dist.all_reduce(total, group=self.group)
        norm = total.sqrt()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_ has it
        for grad in grads.values():
            grad.mul_(factor.to(grad.dtype))
        return norm

    def _step(self, batch: Mapping[str, Any], *, training: bool) -> Tensor:
        failure: Exception | None = None
        told: list[tuple[str, str]] = []
        try:
            self._divide(batch)
            if training:
                self._scheduled()
            told = [
                ("the shapes of the batch", shapes_of(batch)),
                ("the items of its micro-batches", str([share for _, share in self._feed])),
                *contents_of(batch),
            ]
        except Exception as error:
            failure = error
        self._agree(failure, told)
        self._losses = []
        kept = self._shared.set_aside() if training else {}
        try:
            self._agree(self._trained() if training else self._evaluated(), [])
        except Exception:
            if training:
                self.model.zero_grad(set_to_none=True)  # what there is of them is part of a step that never was
            raise
        finally:
            self._feed = []
        if training:
            self._shared.add(self.group, kept)
        dtype = self._dtype_of(self._script)
        total = torch.stack(self._losses).sum() if self._losses else torch.zeros((), device=self._device, dtype=dtype)
        dist.broadcast(total, group=self.group, group_src=self._ranks[-1])
        return total

    def _trained(self) -> Exception | None:
        """Run the schedule; return the first exception of this rank."""
        schedule, stages = self._scheduled()
        for stage in stages:
            stage.failure = None
        numbers = torch.arange(len(self._feed), device=self._device)
        first = (numbers,) if self._ranks[0] == self.rank else ()
        target = {"target": numbers} if self._ranks[-1] == self.rank else {}
        schedule.step(*first, number=numbers, return_outputs=False, **target)
        return next((stage.failure for stage in stages if stage.failure is not None), None)

    def _evaluated(self) -> Exception | None:
        stages = {stage.index: stage for stage in self._stages}

        def run(stage: int, number: int, arrived: list[Tensor]) -> tuple[Tensor, ...]:
            return self._run(stages[stage], number, arrived)

        return forward_only(
            run, self._script, len(self._feed), ranks=self._ranks, group=self.group, device=self._device
        )

    @staticmethod
    def _dtype_of(script: Script) -> torch.dtype:
        return torch.get_default_dtype() if script.loss is None else script.loss.dtype

    def _agree(self, failure: Exception | None, told: list[tuple[str, str]]) -> None:
        report = Report(items=tuple(told)) if failure is None else Report.of_error(failure)
        agree(report, failure, group=self.group)

    def _divide(self, batch: Mapping[str, Any]) -> None:
        """Divide a batch and find its script."""
        parts = micro_batches(batch, number=self._number, size=self._size)
        weights = [self._weight(part) for part in parts]
        total = sum(weights)
        self._feed = [(part, weight / total if total else 0.0) for part, weight in zip(parts, weights, strict=True)]
        self._key = f"{self.model.training} {shapes_of(parts[0])}"
        if self._key not in self._scripts:
            self._scripts[self._key] = self._rehearsal(
                parts[0], lambda out: self._loss(out, parts[0]), training=self.model.training
            )

    @property
    def _script(self) -> Script:
        return self._scripts[self._key]

    def _scheduled(self) -> tuple[Any, list[SafeStage]]:
        """Return the schedule for micro-batches as there are now, and its stages."""
        key = f"{len(self._feed)} {self._key}"
        found = self._schedules.pop(key, None)
        if found is None:
            while len(self._schedules) >= _KEPT:
                del self._schedules[next(iter(self._schedules))]
            stages = [self._safe(stage) for stage in self._stages]
            try:
                found = (self._plan.make(stages, len(self._feed), _the_loss_itself), stages)
            except ValueError as error:
                raise ConfigError(
                    f"{self._plan.name} of torch cannot run {len(self._feed)} micro-batches through {len(self.cut)} "
                    f"stages: {error}; use another num_microbatches"
                ) from error
        self._schedules[key] = found  # the last one used is the last
        return found

    def _safe(self, stage: Stage) -> SafeStage:
        def run(number: int, arrived: list[Tensor]) -> tuple[Tensor, ...]:
            return self._run(stage, number, arrived)

        script, number = self._script, Value((1,), torch.int64)
        arrives = script.crossings[stage.index - 1].values if stage.index else (number,)
        leaves = (Value((), self._dtype_of(script)),) if stage.is_last else script.crossings[stage.index].values
        chunk = Chunk(run, stage.parameters)
        return SafeStage(chunk, stage.index, len(self.cut), (arrives, leaves), self._device, self.group)

    def _run(self, stage: Stage, number: int, arrived: list[Tensor]) -> tuple[Tensor, ...]:
        """Run a stage for the micro-batch of a number; return what leaves it, of the last one its part of the loss."""
        arguments, share = self._feed[number]
        random = self._random[stage.index]
        random.enter()
        try:
            out = stage(arguments, arrived, self._script)
        finally:
            random.leave()
        if not stage.is_last:
            return tuple(out)
        if share:
            loss = self._loss(out, arguments) * share
        else:  # nothing of it counts, and its own mean may be NaN
            loss = torch.stack([parameter.sum() for parameter in stage.parameters()]).sum() * 0.0
        self._losses.append(loss.detach())
        return (loss,)


def _stages_of(model: nn.Module, policy: Policy | type[Policy] | None) -> Stages:
    stages = ModelSharder(model, policy, ShardConfig(tensor_parallel_size=1)).compile().stages
    if stages is None:
        raise NotSupportedError(
            f"the policy of {type(model).__name__} does not say where it can be cut; give it "
            "stages=shardcore.Stages(...)"
        )
    return stages


def _the_loss_itself(left: tuple[Tensor, ...], target: Tensor) -> Tensor:
    return left[0]  # torch takes no backward of a tuple without gradients


def _loss_of(out: Any, arguments: Mapping[str, Any]) -> Tensor:
    loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    if not isinstance(loss, Tensor):
        raise ConfigError(f"a {type(out).__name__} has no loss; pass labels, or give Pipeline loss=")
    return loss
