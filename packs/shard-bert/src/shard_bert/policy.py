"""How BERT is sharded: what every class of its modules needs; `shard_bert.heads` adds what each head needs.

Many encoders are built like BERT. Their packs derive from this policy and say what their classes are called.
"""

from __future__ import annotations

from typing import ClassVar

from shardcore.policy import Heads, ModulePolicy, Rule, Stages
from shardcore.styles import enter_arg, norm, outputs, region, replicate, sequence, vocab
from shardcore_transformers import PretrainedPolicy

__all__ = ["TOKENS", "BertModelPolicy"]

#: Where tokens may be split, on every release.
TOKENS = sequence(scatter="encoder.layer[0]", gather="encoder.layer[-1]", stack="encoder")
_DIVIDED = sequence(scatter="encoder.layer[0]", gather="encoder.layer[-1]", stack="encoder", attention="attention.self")


def _attention(name: str, *, optional: bool = False) -> list[Rule]:
    """Return the rules of one attention of a block.

    It is entered below the residual connection, which is in its ``output``.
    """
    return [
        region(
            enter=f"{name}.self",
            col=tuple(f"{name}.self.{projection}" for projection in ("query", "key", "value")),
            row=f"{name}.output.dense",
            unit="head",
            optional=optional,
        ),
        norm(f"{name}.output.LayerNorm", optional=optional),
    ]


class BertModelPolicy(PretrainedPolicy):
    """The encoder, or with ``is_decoder`` the decoder, without a head."""

    #: What the names of the model's classes begin with.
    family: ClassVar[str] = "Bert"
    checks = (Heads("num_attention_heads"),)
    stages = Stages(first="embeddings", blocks="encoder.layer", last="pooler")
    #: What a head adds.
    rules: ClassVar[ModulePolicy] = {}

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the model and of its head."""
        # A decoder gives its blocks a cache, unasked, in which each rank would have keys of its own tokens.
        divided = not self.model.config.is_decoder
        return {
            f"{self.family}Model": [
                replicate("pooler", optional=True),
                outputs(attentions="heads", cross_attentions="heads", hidden_states="sequence"),
                _DIVIDED if divided else TOKENS,
            ],
            f"{self.family}Embeddings": [
                vocab("word_embeddings"),
                replicate("position_embeddings", "token_type_embeddings"),
                norm("LayerNorm"),
            ],
            f"{self.family}Encoder": [enter_arg("", "encoder_hidden_states")],
            f"{self.family}Layer": [
                *_attention("attention"),
                *_attention("crossattention", optional=True),
                region(col="intermediate.dense", row="output.dense"),
                norm("output.LayerNorm"),
            ],
            **self.rules,
        }
