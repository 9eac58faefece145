"""How ModernBERT is sharded: what every class of its modules needs."""

from __future__ import annotations

from typing_extensions import override

from shardcore.policy import Heads, ModulePolicy, Stages
from shardcore.styles import norm, outputs, region, replicate, segments, sequence, vocab
from shardcore_transformers import BaseModelPolicy


class ModernBertPolicy(BaseModelPolicy):
    """The encoder, with a head or without; any number of ranks share its heads."""

    words = ("decoder",)
    labels = ("classifier",)
    checks = (Heads("num_attention_heads", uneven=True),)
    stages = Stages(first="embeddings", blocks="layers", last="final_norm", everywhere="rotary_emb")

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the encoder and of its head. In the first block no norm is before the attention."""
        return {
            "ModernBertEmbeddings": [vocab("tok_embeddings"), norm("norm")],
            "ModernBertEncoderLayer": [
                norm("attn_norm", optional=True),
                region(enter="attn", col=segments("attn.Wqkv", 3), row="attn.Wo", unit="head"),
                norm("mlp_norm"),
                region(enter="mlp", col=segments("mlp.Wi", 2), row="mlp.Wo"),
            ],
            "ModernBertModel": [
                norm("final_norm"),
                sequence(scatter="layers[0]", gather="final_norm", attention="attn"),
                outputs(attentions="heads", hidden_states="sequence"),
            ],
            **self.heads(),
        }

    @override
    def heads(self) -> ModulePolicy:
        """Return the rules of the head: before its scores are a linear and a norm."""
        transform: ModulePolicy = {"ModernBertPredictionHead": [replicate("dense"), norm("norm")]}
        return {**transform, **super().heads()} if self.inside else {}
