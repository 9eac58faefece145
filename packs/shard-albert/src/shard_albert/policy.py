"""How ALBERT is sharded: what every class of its modules needs.

Its blocks are groups of layers, each of which runs several times: tokens stay whole between them.
"""

from __future__ import annotations

from typing import ClassVar

from shardcore.policy import Heads, ModulePolicy, Stages
from shardcore.styles import norm, outputs, region, replicate, vocab
from shardcore_transformers import PretrainedPolicy


class AlbertModelPolicy(PretrainedPolicy):
    """The encoder without a head; any number of ranks share its heads."""

    checks = (Heads("num_attention_heads", uneven=True),)
    stages = Stages(
        first=("embeddings", "encoder.embedding_hidden_mapping_in"),
        blocks="encoder.albert_layer_groups",
        last="pooler",
    )
    #: What a head adds.
    rules: ClassVar[ModulePolicy] = {}

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the encoder and of its head.

        The module of the attention holds the residual connection: its linears enter by themselves.
        """
        qkv = ("attention.query", "attention.key", "attention.value")
        return {
            "AlbertModel": [replicate("pooler", optional=True), outputs(attentions="heads")],
            "AlbertEmbeddings": [
                vocab("word_embeddings"),
                replicate("position_embeddings", "token_type_embeddings"),
                norm("LayerNorm"),
            ],
            "AlbertTransformer": [replicate("embedding_hidden_mapping_in")],
            "AlbertLayer": [
                region(col=qkv, row="attention.dense", unit="head"),
                norm("attention.LayerNorm", "full_layer_layer_norm"),
                region(col="ffn", row="ffn_output"),
            ],
            **self.rules,
        }
