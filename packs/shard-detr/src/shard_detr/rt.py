"""How RT-DETR is sharded: attention within a feature map, convolutions between them, and a decoder of places."""

from __future__ import annotations

from typing import ClassVar

from typing_extensions import override

from shard_detr.deformable import DeformableDetrPolicy
from shard_detr.policy import heads_of
from shardcore.policy import Rule, Stages
from shardcore.styles import enter_arg, replicate


class RTDetrPolicy(DeformableDetrPolicy):
    """The model with its heads or without."""

    family: ClassVar[str] = "RTDetr"
    checks = heads_of("RTDetr")
    stack: ClassVar[str] = "HybridEncoder"
    first: ClassVar[tuple[str, ...]] = ("backbone", "encoder_input_proj")
    between: ClassVar[tuple[str, ...]] = (
        *("decoder_input_proj", "enc_output", "enc_score_head", "enc_bbox_head"),
        *("denoising_class_embed", "weight_embedding"),
    )
    refining: ClassVar[tuple[str, ...]] = ("query_pos_head", "bbox_embed", "class_embed")
    mixing: ClassVar[tuple[str, ...]] = ("lateral_convs", "fpn_blocks", "downsample_convs", "pan_blocks")
    stages = Stages(
        first=first,
        blocks=("encoder.aifi", "decoder.layers"),
        between=(
            *("encoder.lateral_convs", "encoder.fpn_blocks", "encoder.downsample_convs", "encoder.pan_blocks"),
            *between,
        ),
        everywhere=("decoder.query_pos_head", "decoder.bbox_embed", "decoder.class_embed"),
        optional=between,
    )

    @override
    def encoder(self) -> list[Rule]:
        return [replicate(*self.mixing)]

    @override
    def encoder_layer(self) -> list[Rule]:
        return self.block()

    @override
    def decoder(self) -> list[Rule]:
        return [enter_arg("", "encoder_hidden_states"), replicate(*self.refining, optional=True)]

    @override
    def entering(self) -> list[Rule]:
        return [enter_arg("", "object_queries_position_embeddings")]


class RTDetrV2Policy(RTDetrPolicy):
    """RT-DETR V2, whose decoder may look at whole pixels."""

    family: ClassVar[str] = "RTDetrV2"
    checks = heads_of("RTDetrV2")
