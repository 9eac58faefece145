"""How DINOv3 is sharded: as DINOv2, with other names, and positions that rotate."""

from __future__ import annotations

from typing import ClassVar

from typing_extensions import override

from shard_dinov2.policy import GATED, SPLIT, Dinov2BackbonePolicy, Dinov2Policy
from shardcore.policy import Rule, Stages
from shardcore.styles import attribute, local_heads, region


class DINOv3ViTPolicy(Dinov2Policy):
    """DINOv3: positions of patches rotate queries and keys."""

    stages = Stages(first="embeddings", blocks="model.layer", last="norm", everywhere="rope_embeddings")
    blocks: ClassVar[str] = "model.layer"
    final: ClassVar[str] = "norm"
    divided: ClassVar[str | tuple[str, ...]] = ()  # there are rotations for patches alone, not for every token
    inside = ""  # the encoder that is named like a base model is no model with a head's

    @override
    def attention(self) -> list[Rule]:
        return [*SPLIT, attribute("attention.num_heads", local_heads)]

    @override
    def mlp(self) -> list[Rule]:
        return [
            GATED if self.model.config.use_gated_mlp else region(enter="mlp", col="mlp.up_proj", row="mlp.down_proj")
        ]


class DINOv3ViTBackbonePolicy(DINOv3ViTPolicy, Dinov2BackbonePolicy):
    """DINOv3 as a backbone."""
