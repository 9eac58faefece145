"""BEiT in early releases of transformers, with the names of BERT, which Data2Vec's vision still has."""

from __future__ import annotations

from typing import ClassVar

from typing_extensions import override

from shard_beit.policy import PYRAMID, TABLE, BeitPolicy
from shardcore.policy import Rule, Stages
from shardcore.styles import attribute, by_heads, local_heads, per_rank, region

_SELF = "attention.attention"


class EarlyBeitPolicy(BeitPolicy):
    """The same under other names; attention makes its bias by itself, and a backbone is the model itself."""

    stages = Stages(
        first=("embeddings", "encoder.relative_position_bias"),
        blocks="encoder.layer",
        last=("layernorm", "pooler", *PYRAMID),
        optional=("encoder.relative_position_bias", "layernorm", "pooler", *PYRAMID),
    )
    blocks: ClassVar[str] = "encoder.layer"
    shared: ClassVar[str] = f"encoder.{TABLE}"

    @override
    def block(self) -> list[Rule]:
        return [
            region(
                enter=_SELF,
                col=(f"{_SELF}.query", f"{_SELF}.key", f"{_SELF}.value"),
                row="attention.output.dense",
                unit="head",
            ),
            attribute(f"{_SELF}.num_attention_heads", local_heads),
            attribute(f"{_SELF}.all_head_size", per_rank),
            by_heads(f"{_SELF}.{TABLE}", dim=1, optional=True),
            region(col="intermediate.dense", row="output.dense"),
        ]
