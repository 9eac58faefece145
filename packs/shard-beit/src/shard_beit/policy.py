"""How BEiT is sharded: a bias for each head and each distance in the image; `shard_beit.early` has other names."""

from __future__ import annotations

from typing import ClassVar

from shardcore.policy import Heads, ModulePolicy, Rule, Stages
from shardcore.styles import by_heads, norm, outputs, region, replicate
from shardcore_transformers import BaseModelPolicy

#: What makes features of several sizes: beside the model or, in early backbones, in it.
PYRAMID = ("fpn", "fpn1", "fpn2")
TABLE = "relative_position_bias.relative_position_bias_table"


class BeitPolicy(BaseModelPolicy):
    """The encoder with a head or without, which makes labels of images or pixels, or visual tokens; a backbone."""

    checks = (Heads("num_attention_heads"),)
    stages = Stages(
        first=("embeddings", "shared_position_bias"),
        blocks="layers",
        last=("layernorm", "pooler"),
        optional=("shared_position_bias", "layernorm", "pooler"),
    )
    #: The list of blocks, and the table of biases that they may share.
    blocks: ClassVar[str] = "layers"
    shared: ClassVar[str] = "shared_position_bias.relative_position_bias_table"
    words = ()
    labels = ("classifier", "layernorm", "lm_head", *PYRAMID, "decode_head", "auxiliary_head")

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the encoder, of the bias that its blocks may share, and of a head."""
        return {
            self.base.embeddings: [replicate("")],
            type(self.base.get_submodule(f"{self.blocks}.0")): [
                norm("layernorm_before", "layernorm_after"),
                *self.block(),
                replicate("lambda_1", "lambda_2", optional=True),
            ],
            self.base: [
                by_heads(self.shared, dim=1, optional=True),
                replicate("layernorm", "pooler", *PYRAMID, optional=True),
                outputs(attentions="heads"),
            ],
            **self.heads(),
        }

    def block(self) -> list[Rule]:
        """Return the rules of the attention and of the MLP of a block."""
        return [
            region(
                enter="attention",
                col=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
                row="attention.o_proj",
                unit="head",
            ),
            by_heads(TABLE, dim=1, optional=True),
            region(enter="mlp", col="mlp.fc1", row="mlp.fc2"),
        ]
