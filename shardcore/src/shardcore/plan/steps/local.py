"""Steps that split nothing: one rank alone carries them out too."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

from shardcore.nn.base import SwappedModule
from shardcore.nn.blocks.compiled import CompiledBlock
from shardcore.nn.blocks.norm import FusedRMSNorm
from shardcore.nn.blocks.recompute import RecomputedBlock
from shardcore.plan.steps.base import Bench, Commit, Phase, Step

__all__ = ["Compile", "FreezeForInference", "FuseNorm", "Recompute"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FuseNorm(Step):
    """A root-mean-square norm computes with `torch.nn.functional.rms_norm`.

    Attributes:
        eps: the attribute of the module that holds the constant below the root.
    """

    splits: ClassVar[bool] = False
    phase: ClassVar[Phase] = Phase.FUSE

    eps: str

    def describe(self) -> str:
        """See `Step.describe`."""
        return "torch's fused rms_norm"

    @property
    def behaviours(self) -> tuple[tuple[str, type[SwappedModule]], ...]:
        """See `Step.behaviours`."""
        return ((self.path, FusedRMSNorm),)

    @property
    def fuses(self) -> str | None:
        """See `Step.fuses`."""
        return "torch's rms_norm"

    def prepare(self, bench: Bench) -> Commit:
        """See `Step.prepare`."""
        return functools.partial(FusedRMSNorm.fuse, bench.model.get_submodule(self.path), self.eps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compile(Step):
    """The module's forward is compiled while training."""

    splits: ClassVar[bool] = False
    phase: ClassVar[Phase] = Phase.COMPILE

    def describe(self) -> str:
        """See `Step.describe`."""
        return "compiled while training"

    @property
    def behaviours(self) -> tuple[tuple[str, type[SwappedModule]], ...]:
        """See `Step.behaviours`."""
        return ((self.path, CompiledBlock),)

    def prepare(self, bench: Bench) -> Commit:
        """See `Step.prepare`."""
        return functools.partial(CompiledBlock.compile_block, bench.model.get_submodule(self.path))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute(Step):
    """The module's activations are recomputed in the backward."""

    splits: ClassVar[bool] = False
    phase: ClassVar[Phase] = Phase.RECOMPUTE

    def describe(self) -> str:
        """See `Step.describe`."""
        return "recomputed in the backward"

    @property
    def behaviours(self) -> tuple[tuple[str, type[SwappedModule]], ...]:
        """See `Step.behaviours`."""
        return ((self.path, RecomputedBlock),)

    def prepare(self, bench: Bench) -> Commit:
        """See `Step.prepare`."""
        return functools.partial(RecomputedBlock.recompute, bench.model.get_submodule(self.path))


@dataclass(frozen=True, slots=True, kw_only=True)
class FreezeForInference(Step):
    """The model is put into eval mode, and its parameters need no gradient."""

    splits: ClassVar[bool] = False

    def describe(self) -> str:
        """See `Step.describe`."""
        return "eval mode, no gradients"

    def prepare(self, bench: Bench) -> Commit:
        """See `Step.prepare`."""
        module = bench.model.get_submodule(self.path)

        def commit() -> None:
            module.requires_grad_(False).eval()

        return commit
