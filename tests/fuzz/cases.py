"""The cases of all installed packs, with settings together that the conformance kit tries one by one."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from draws import Dice, Draw
from pipelines import Pipelined
from shardcore.plugins.registry import default_registry
from shardcore_testing import Case
from shardcore_testing.subject import Subject, cases_of
from training import Sharded, Whole

__all__ = ["CaseSharded", "CaseWhole", "build", "draw_case"]


@functools.cache
def _cases() -> Mapping[str, Case]:
    """Return the cases of the installed packs, by what a draw calls them."""
    packs = sorted((pack for pack in default_registry().packs if pack.cases), key=lambda pack: pack.name)
    return {f"{pack.name} {case.name}": case for pack in packs for case in cases_of(pack.cases)}


def _normalizes_over_a_batch(case: Case) -> bool:
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in case.build().modules())


def draw_case(dice: Dice) -> dict[str, Any]:
    """Return a draw of one case, and of settings that it supports together."""
    name = dice.of(*_cases())
    case = _cases()[name]
    tp = dice.of(*(size for size in case.supports.tensor_parallel if size <= 4))
    axes, fields = [""], {}
    if tp <= 2:
        if not _normalizes_over_a_batch(case):  # which is that of a replica, in FSDP2 too
            axes += ["dp_shard_size", "dp_replicate_size"]
        if case.supports.pipeline and case.supports.micro_batches and case.loss == "loss":
            axes.append("pipeline_parallel_size")
        if case.supports.experts is True:
            axes.append("expert_parallel_size")
        if case.supports.context:
            axes.append("context_parallel_size")
    axis = dice.of(*axes)
    mesh = {"tensor_parallel_size": tp, **({axis: 2} if axis else {})}
    if axis == "expert_parallel_size":
        mesh["dp_shard_size"] = 2
    if axis == "pipeline_parallel_size":
        fields["num_microbatches"] = dice.of(1, 2)
    if case.supports.sequence and tp > 1 and dice.often(0.5):
        fields["enable_sequence_parallelism"] = True
        if dice.often(0.4) and not axis.startswith("pipeline"):
            fields["sequence_keep_gathered"] = False
    if dice.often(0.4):
        fields["partial_gradients"] = dice.of("in_backward", "deferred")
    if dice.often(0.3) and case.loss == "loss" and case.supports.generation:
        fields["parallel_output"] = True
    checkpointing = ""
    if case.supports.checkpointing and dice.often(0.3):
        # With fully_shard alone, too, torch goes back through what is in front of Deformable DETR's blocks once for
        # each of them that is checkpointed so.
        reentrant = case.supports.reentrant and not (axis.startswith("dp") and "deformable" in case.name)
        checkpointing = dice.of("non-reentrant", *(["reentrant"] if reentrant else []))
    return {
        "family": "cases",
        "cls": name,
        "mesh": mesh,
        "ranks": tp * (2 if axis else 1),
        "fields": fields,
        "model": {option: dice.of(*values) for option, values in case.options.items()},
        "batch": {},
        "call": "training",
        "checkpointing": checkpointing,
        "frozen": dice.of(0.3, 0.7) if dice.often(0.3) and not axis.startswith("pipeline") else 0.0,
        "how": {
            "steps": dice.of(1, 2),
            "accumulate": 1 if axis.startswith("pipeline") else dice.of(1, 2),
            "max_norm": dice.of(0.0, 0.1),
            "optimizer": dice.of("adamw", "sgd"),
        },
    }


def _subject(draw: Draw) -> Subject:
    return Subject(case=_cases()[draw.cls], tp=draw.tp, options=draw.model)


def build(draw: Draw) -> Any:
    """Return the unsharded model, some of its parameters frozen."""
    model = _subject(draw).build()
    generator = torch.Generator().manual_seed(draw.number)
    for parameter in model.parameters():
        if draw.frozen and float(torch.rand((), generator=generator)) < draw.frozen:
            parameter.requires_grad_(False)
    return model


class CaseWhole(Whole):
    """The training of an unsharded case."""

    def __init__(self, draw: Draw, model: nn.Module) -> None:
        super().__init__(draw, model)
        self._native = copy.deepcopy(model)  # whose class and configuration a batch is made for

    def batch(self, step: int, number: int, replica: int) -> dict[str, Any]:
        """Return the batch of one replica."""
        return _subject(self.draw).inputs(self._native, 100 * step + 10 * number + replica)

    def loss(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the loss of one call."""
        return _subject(self.draw).loss(self.model(**batch))

    @torch.no_grad()
    def forward(self) -> dict[str, Tensor]:
        """Return the loss of a call without gradients."""
        return {"loss": self.loss(self.batch(9, 0, self.replica)).clone()}


class _CaseSharded(CaseWhole, Sharded):
    """The training of a sharded one."""


class _CaseInStages(CaseWhole, Pipelined):
    """The training of one whose blocks are in stages."""


def CaseSharded(draw: Draw, model: nn.Module) -> Sharded:  # noqa: N802  # a class, by what is drawn
    """Return the training of a sharded case, in a pipeline or not."""
    return (_CaseInStages if draw.pp > 1 else _CaseSharded)(draw, model)
