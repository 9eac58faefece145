"""How ALBERT is sharded: what every class of its modules needs.

Its blocks are groups of layers, each of which runs several times: tokens stay whole between them.
"""

from __future__ import annotations

from typing_extensions import override

from shard_bert.heads import is_for, masked_lm_loss, pretraining_loss
from shardcore.policy import Heads, ModulePolicy, Stages
from shardcore.styles import head, loss, norm, outputs, region, replicate, vocab
from shardcore_transformers import BaseModelPolicy


class AlbertPolicy(BaseModelPolicy):
    """The encoder, with a head or without; any number of ranks share its heads."""

    checks = (Heads("num_attention_heads", uneven=True),)
    stages = Stages(
        first=("embeddings", "encoder.embedding_hidden_mapping_in"),
        blocks="encoder.albert_layer_groups",
        last="pooler",
    )

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
            **self.heads(),
        }

    @override
    def heads(self) -> ModulePolicy:
        """Return the rules of the head: words are scored by a decoder tied to the embedding, its bias beside it."""
        words: ModulePolicy = {"AlbertMLMHead": [replicate("dense"), norm("LayerNorm"), head("decoder", bias="bias")]}
        if is_for(self.model, "MaskedLM"):
            return {**words, self.model: [loss(masked_lm_loss)]}
        if is_for(self.model, "PreTraining"):
            labels, logits = ("labels", "sentence_order_label"), ("prediction_logits", "sop_logits")
            order = replicate("sop_classifier.classifier")
            return {**words, self.model: [order, loss(pretraining_loss, labels=labels, logits=logits)]}
        return super().heads()
