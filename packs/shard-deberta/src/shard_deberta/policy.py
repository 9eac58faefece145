"""How DeBERTa-v2 is sharded: what every class of its modules needs.

Its attention is disentangled: content attends to relative positions, and positions attend to content. The table of
relative positions is made before the blocks, and enters each of them.
"""

from __future__ import annotations

from typing_extensions import override

from shard_bert.heads import is_for
from shard_deberta import heads
from shardcore.policy import Heads, ModulePolicy, Rule, Stages
from shardcore.styles import (
    attribute,
    enter_arg,
    local_heads,
    norm,
    outputs,
    region,
    replicate,
    sequence,
    shared_rng,
    vocab,
)
from shardcore_transformers import BaseModelPolicy


class DebertaV2Policy(BaseModelPolicy):
    """The encoder, with a head or without; any number of ranks share its heads."""

    labels = ("pooler", "classifier", "qa_outputs")
    checks = (Heads("num_attention_heads", uneven=True),)
    stages = Stages(
        first=("embeddings", "encoder.conv"),
        blocks="encoder.layer",
        everywhere=("encoder.rel_embeddings", "encoder.LayerNorm"),
        optional=("encoder.conv", "encoder.rel_embeddings", "encoder.LayerNorm"),
    )

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the encoder and of its head."""
        return {
            "DebertaV2Model": [outputs(attentions="heads", hidden_states="sequence"), *self.tokens()],
            "DebertaV2Embeddings": [
                vocab("word_embeddings"),
                replicate("position_embeddings", "token_type_embeddings", "embed_proj", optional=True),
                norm("LayerNorm"),
            ],
            "DebertaV2Encoder": [replicate("rel_embeddings", "LayerNorm", "conv", optional=True)],
            "DebertaV2Layer": [
                enter_arg("", "rel_embeddings"),
                *self.attention(),
                norm("attention.output.LayerNorm"),
                region(col="intermediate.dense", row="output.dense"),
                norm("output.LayerNorm"),
            ],
            **self.heads(),
        }

    def tokens(self) -> list[Rule]:
        """Return where tokens may be split: nowhere with a convolution over all of them after the first block."""
        mixed = getattr(self.model.config, "conv_kernel_size", 0) > 0
        return [] if mixed else [sequence(scatter="encoder.layer[0]", gather="encoder.layer[-1]", stack="encoder")]

    def attention(self) -> list[Rule]:
        """Return the rules of the attention: keys and queries of positions are those of content, or have linears."""
        config = self.model.config
        own = config.relative_attention and not getattr(config, "share_att_key", False)
        positions = {"c2p": "pos_key_proj", "p2c": "pos_query_proj"}
        linears = ["query_proj", "key_proj", "value_proj"]
        linears += [linear for kind, linear in positions.items() if own and kind in (config.pos_att_type or ())]
        return [
            region(
                enter="attention.self",
                col=tuple(f"attention.self.{linear}" for linear in linears),
                row="attention.output.dense",
                unit="head",
            ),
            attribute("attention.self.num_attention_heads", local_heads),
            shared_rng("attention.self.pos_dropout", optional=True),
        ]

    @override
    def heads(self) -> ModulePolicy:
        """Return the rules of the head."""
        return heads.masked_lm(self.model) if is_for(self.model, "MaskedLM") else super().heads()
