"""Steps that split nothing: one rank alone carries them out too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from shardcore.nn.base import ParallelMixin
from shardcore.nn.blocks import CompiledBlock, FusedRMSNorm, RecomputedBlock
from shardcore.plan.steps.base import ApplyContext, Commit, Phase, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class FuseNorm(Step):
    """A root-mean-square norm computes with `torch.nn.functional.rms_norm`; the attribute ``eps`` is its epsilon."""

    splits: ClassVar[bool] = False
    words: ClassVar[str] = "torch's fused rms_norm"
    phase: ClassVar[Phase] = Phase.FUSE
    mixin: ClassVar[type[ParallelMixin]] = FusedRMSNorm
    fuses: ClassVar[str] = "torch's rms_norm"

    eps: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Compile(Step):
    """The module's forward is compiled while training."""

    splits: ClassVar[bool] = False
    words: ClassVar[str] = "compiled while training"
    phase: ClassVar[Phase] = Phase.COMPILE
    mixin: ClassVar[type[ParallelMixin]] = CompiledBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute(Step):
    """The module's activations are recomputed in the backward."""

    splits: ClassVar[bool] = False
    words: ClassVar[str] = "recomputed in the backward"
    phase: ClassVar[Phase] = Phase.RECOMPUTE
    mixin: ClassVar[type[ParallelMixin]] = RecomputedBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class FreezeForInference(Step):
    """The model is put into eval mode, and its parameters need no gradient."""

    splits: ClassVar[bool] = False
    words: ClassVar[str] = "eval mode, no gradients"

    @override
    def prepare(self, ctx: ApplyContext) -> Commit:
        module = ctx.model.get_submodule(self.path)
        return lambda: module.requires_grad_(False).eval()
