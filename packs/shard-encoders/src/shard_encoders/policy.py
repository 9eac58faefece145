"""How encoders that are built like BERT are sharded: what differs in each family, and nothing else."""

from __future__ import annotations

from typing import ClassVar

from shard_bert.heads import is_for, masked_lm_loss
from shard_bert.policy import BertPolicy
from shard_llama.policy import LlamaPolicy
from shardcore.policy import ModulePolicy, Rule, Stages
from shardcore.styles import attribute, by_heads, head, loss, norm, partial, per_rank, region, replicate


class ElectraPolicy(BertPolicy):
    """ELECTRA: embeddings may be narrower than the blocks; a generator scores words, a discriminator labels them."""

    stages = Stages(first=("embeddings", "embeddings_project"), blocks="encoder.layer", optional="embeddings_project")

    def encoder(self) -> list[Rule]:
        """Return the rules of what is around the blocks."""
        return [*super().encoder(), replicate("embeddings_project", optional=True)]

    def heads(self) -> ModulePolicy:
        """Return the rules of the heads."""
        words = [head("generator_lm_head", optional=True), norm("generator_predictions.LayerNorm", optional=True)]
        whole = ("generator_predictions.dense", "discriminator_predictions", "classifier", "qa_outputs")
        scored = [loss(masked_lm_loss)] if is_for(self.model, "MaskedLM") else []
        return {self.model: [*words, replicate(*whole, "sequence_summary", optional=True), *scored]}


class EuroBertPolicy(LlamaPolicy):
    """EuroBERT: the blocks of Llama, in which every token sees every other."""

    labels: ClassVar[tuple[str, ...]] = ("dense", "classifier")


class MPNetPolicy(BertPolicy):
    """MPNet: a bias for each head and each distance, made before the blocks."""

    stages = Stages(first=("embeddings", "encoder.relative_attention_bias"), blocks="encoder.layer", last="pooler")
    added: ClassVar[tuple[str, ...]] = ("position_embeddings",)
    attended: ClassVar[str] = "LayerNorm"
    context: ClassVar[str | tuple[str, ...]] = ()  # its attention is written out
    places: ClassVar[str | tuple[str, ...]] = "pooler_output"

    def encoder(self) -> list[Rule]:
        """Return the rules of what is around the blocks."""
        return [*super().encoder(), by_heads("encoder.relative_attention_bias", dim=1)]

    def attention(self, name: str, *, optional: bool = False) -> list[Rule]:
        """Return the rules of one attention of a block."""
        return [
            region(
                enter=f"{name}.attn",
                col=tuple(f"{name}.attn.{projection}" for projection in "qkv"),
                row=f"{name}.attn.o",
                unit="head",
                optional=optional,
            ),
            attribute(f"{name}.attn.all_head_size", per_rank, optional=optional),
            norm(f"{name}.{self.attended}", optional=optional),
        ]


class RoFormerPolicy(BertPolicy):
    """RoFormer: tokens are turned by a table of sines; embeddings may be narrower than the blocks."""

    stages = Stages(
        first=("embeddings", "embeddings_project", "encoder.embed_positions"),
        blocks="encoder.layer",
        optional="embeddings_project",
    )
    added: ClassVar[tuple[str, ...]] = ("token_type_embeddings",)
    context: ClassVar[str | tuple[str, ...]] = ()  # its attention is written out

    def encoder(self) -> list[Rule]:
        """Return the rules of what is around the blocks."""
        return [
            *super().encoder(),
            partial("encoder.embed_positions"),  # all heads read it, and what `from_pretrained` returns trains it
            replicate("embeddings_project", optional=True),
        ]

    def attention(self, name: str, *, optional: bool = False) -> list[Rule]:
        """Return the rules of one attention of a block."""
        heads = attribute(f"{name}.self.all_head_size", per_rank, optional=optional)
        return [*super().attention(name, optional=optional), heads]
