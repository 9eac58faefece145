"""How SEW is sharded: Wav2Vec2 whose blocks see fewer tokens than there are frames."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from typing_extensions import override

from shard_wav2vec2.policy import Wav2Vec2Policy
from shardcore.policy import Rule
from shardcore.styles import replicate


class SEWPolicy(Wav2Vec2Policy):
    """SEW: neighbouring frames are pooled in front of the blocks, and made again behind them."""

    front: ClassVar[tuple[str, ...]] = ("layer_norm", *Wav2Vec2Policy.front)
    stages = replace(
        Wav2Vec2Policy.stages,
        first=(*Wav2Vec2Policy.front, "layer_norm", "encoder.pos_conv_embed", "encoder.layer_norm"),
        last="encoder.upsample",
        everywhere=(),
        optional=("feature_projection", "masked_spec_embed"),
    )

    @override
    def encoder(self) -> list[Rule]:
        return [*super().encoder(), replicate("upsample")]
