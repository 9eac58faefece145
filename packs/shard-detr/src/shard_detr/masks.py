"""How detectors that draw masks are sharded: what draws them is whole on every rank."""

from __future__ import annotations

from typing import ClassVar

from torch import nn
from typing_extensions import override

from shard_detr.conditional import ConditionalDetrPolicy
from shard_detr.policy import DetrPolicy
from shardcore.policy import ModulePolicy
from shardcore.styles import replicate


class DetrForSegmentationPolicy(DetrPolicy):
    """DETR with masks."""

    detector: ClassVar[str] = "detr"

    @property
    @override
    def inside(self) -> str:
        return f"{self.detector}.model"

    @override
    def set_model(self, model: nn.Module) -> None:
        super().set_model(model)
        heads = (*(f"{self.detector}.{name}" for name in self.labels), "mask_head", "bbox_attention")
        self.stages = type(self).stages.under(self.inside, then=heads)

    @override
    def heads(self) -> ModulePolicy:
        names = tuple(f"{self.detector}.{name}" for name in self.labels)
        return {self.model: [replicate(*names, "mask_head", "bbox_attention")]}


class ConditionalDetrForSegmentationPolicy(DetrForSegmentationPolicy, ConditionalDetrPolicy):
    """Conditional DETR with masks."""

    detector: ClassVar[str] = "conditional_detr"
