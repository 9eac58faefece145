"""How BEiT is sharded: a bias for each head and each distance in the image."""

from __future__ import annotations

from typing import ClassVar

from transformers.models.beit import modeling_beit

from shard_beit import early
from shardcore.policy import Heads, ModulePolicy, Rule, Stages
from shardcore.styles import by_heads, norm, outputs, region, replicate
from shardcore_transformers import PretrainedPolicy

#: In early releases of transformers layers have other names, and attention makes its bias by itself.
IS_EARLY = hasattr(modeling_beit, "BeitSelfAttention")

_TABLE = "relative_position_bias_table"
_ATTENTION: list[Rule] = [
    region(
        enter="attention",
        col=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        row="attention.o_proj",
        unit="head",
    ),
    by_heads(f"relative_position_bias.{_TABLE}", dim=1, optional=True),
    region(enter="mlp", col="mlp.fc1", row="mlp.fc2"),
]
_LAYER: list[Rule] = [
    norm("layernorm_before", "layernorm_after"),
    *(early.ATTENTION if IS_EARLY else _ATTENTION),
    replicate("lambda_1", "lambda_2", optional=True),
]
_SHARED = by_heads(f"shared_position_bias.{_TABLE}", dim=1, optional=True)
#: The rules of the encoder itself.
MODEL: list[Rule] = [
    *([] if IS_EARLY else [_SHARED]),
    replicate("layernorm", "pooler", optional=True),
    outputs(attentions="heads"),
]
STAGES = (
    early.STAGES
    if IS_EARLY
    else Stages(
        first=("embeddings", "shared_position_bias"),
        blocks="layers",
        last=("layernorm", "pooler"),
        optional=("shared_position_bias", "layernorm", "pooler"),
    )
)


class BeitModelPolicy(PretrainedPolicy):
    """The encoder without a head."""

    checks = (Heads("num_attention_heads"),)
    stages = STAGES
    #: What a head adds.
    rules: ClassVar[ModulePolicy] = {}

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the encoder, of the bias that its layers may share, and of a head."""
        return {
            "BeitEmbeddings": [replicate("")],
            "BeitLayer": _LAYER,
            **(early.SHARED if IS_EARLY else {}),
            "BeitModel": MODEL,
            **self.rules,
        }
