"""How BERT is sharded, and encoders that are built like it: families derive from this, and say in what they differ."""

from __future__ import annotations

from typing import ClassVar

from typing_extensions import override

from shard_bert import before5, heads
from shardcore.policy import Heads, ModulePolicy, Rule, Stages
from shardcore.styles import enter_arg, norm, outputs, region, replicate, sequence, vocab
from shardcore_transformers import BaseModelPolicy


class BertPolicy(BaseModelPolicy):
    """An encoder like BERT, or with ``is_decoder`` a decoder, with a head or without."""

    checks = (Heads("num_attention_heads"),)
    #: Of the encoder; a head follows.
    stages = Stages(first="embeddings", blocks="encoder.layer", last="pooler")
    #: What is added to the embeddings of words, and the norm of the sum.
    added: ClassVar[tuple[str, ...]] = ("position_embeddings", "token_type_embeddings")
    embedded: ClassVar[str] = "LayerNorm"
    #: The norms of an attention and of a block, and the one behind the blocks, if there is one.
    attended: ClassVar[str] = "output.LayerNorm"
    fed: ClassVar[str] = "output.LayerNorm"
    final: ClassVar[str] = ""
    #: The attention that context parallelism may compute.
    context: ClassVar[str | tuple[str, ...]] = () if before5.IS_OLD else "attention.self"

    #: What has a place in the tuple that the encoder returns where it is None.
    places: ClassVar[str | tuple[str, ...]] = "pooler_output" if before5.IS_OLD else ()

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the encoder, its blocks, and what makes words or labels of what it returns."""
        encoder = self.base
        block = encoder.encoder.layer[0]
        return {
            encoder: self.encoder(),
            encoder.embeddings: self.embeddings(),
            encoder.encoder: [enter_arg("", "encoder_hidden_states")] if hasattr(block, "crossattention") else [],
            type(block): self.block(),
            **(before5.rules_of(encoder) if before5.IS_OLD else {}),
            **(self.heads() if self.inside else {}),
        }

    def encoder(self) -> list[Rule]:
        """Return the rules of what is around the blocks."""
        # A decoder gives its blocks a cache, unasked, in which each rank would have keys of its own tokens.
        attention = () if getattr(self.model.config, "is_decoder", False) else self.context
        last = self.final or "encoder.layer[-1]"
        return [
            *([norm(self.final)] if self.final else []),
            replicate("pooler", optional=True),
            outputs(attentions="heads", cross_attentions="heads", hidden_states="sequence", places=self.places),
            sequence(scatter="encoder.layer[0]", gather=last, stack="encoder", attention=attention),
        ]

    def embeddings(self) -> list[Rule]:
        """Return the rules of what makes states of tokens."""
        return [vocab("word_embeddings"), replicate(*self.added, optional=True), norm(self.embedded, optional=True)]

    def block(self) -> list[Rule]:
        """Return the rules of one block."""
        return [
            *self.attention("attention"),
            *self.attention("crossattention", optional=True),
            region(col="intermediate.dense", row="output.dense"),
            norm(self.fed),
        ]

    def attention(self, name: str, *, optional: bool = False) -> list[Rule]:
        """Return the rules of one attention of a block, entered below the residual connection in its ``output``."""
        return [
            region(
                enter=f"{name}.self",
                col=tuple(f"{name}.self.{projection}" for projection in ("query", "key", "value")),
                row=f"{name}.output.dense",
                unit="head",
                optional=optional,
            ),
            norm(f"{name}.{self.attended}", optional=optional),
        ]

    @override
    def heads(self) -> ModulePolicy:
        """Return the rules of what makes words or labels of the states."""
        return heads.rules_of(self.model)
