"""How encoders are sharded that are built like BERT, with norms in front of attention and MLP and behind the blocks."""

from __future__ import annotations

from typing import ClassVar

from shard_bert.policy import BertPolicy
from shardcore.policy import ModulePolicy, Rule, Stages
from shardcore.styles import attribute, norm, per_rank, replicate


class EsmPolicy(BertPolicy):
    """ESM: norms are in front of attention and MLP, and behind the blocks."""

    stages = Stages(
        first="embeddings",
        blocks="encoder.layer",
        last=("encoder.emb_layer_norm_after", "pooler", "contact_head"),
        everywhere="rotary_embeddings",
    )
    added: ClassVar[tuple[str, ...]] = ("position_embeddings",)
    embedded: ClassVar[str] = "layer_norm"
    attended: ClassVar[str] = "LayerNorm"
    fed: ClassVar[str] = "LayerNorm"
    final: ClassVar[str] = "encoder.emb_layer_norm_after"

    def encoder(self) -> list[Rule]:
        """Return the rules of what is around the blocks."""
        return [*super().encoder(), replicate("contact_head")]

    def embeddings(self) -> list[Rule]:
        """Return the rules of what makes states of tokens: there are 33 words, too few to split."""
        return [replicate("word_embeddings", *self.added, optional=True), norm(self.embedded, optional=True)]

    def heads(self) -> ModulePolicy:
        """Return the rules of the heads."""
        return {self.model: [replicate("lm_head", "classifier", optional=True)]}


class MegatronBertPolicy(BertPolicy):
    """Megatron-BERT: norms are in front of attention and MLP, and behind the blocks."""

    stages = Stages(first="embeddings", blocks="encoder.layer", last=("encoder.ln", "pooler"))
    attended: ClassVar[str] = "ln"
    fed: ClassVar[str] = "ln"
    final: ClassVar[str] = "encoder.ln"
    context: ClassVar[str | tuple[str, ...]] = ()  # its attention is written out
    places: ClassVar[str | tuple[str, ...]] = "pooler_output"

    def attention(self, name: str, *, optional: bool = False) -> list[Rule]:
        """Return the rules of one attention of a block."""
        return [
            *super().attention(name, optional=optional),
            attribute(f"{name}.self.all_head_size", per_rank, optional=optional),
        ]


class XLMRobertaXLPolicy(BertPolicy):
    """XLM-RoBERTa-XL: norms are in front of attention and MLP, and behind the blocks."""

    stages = Stages(first="embeddings", blocks="encoder.layer", last=("encoder.LayerNorm", "pooler"))
    attended: ClassVar[str] = "self_attn_layer_norm"
    fed: ClassVar[str] = "LayerNorm"
    final: ClassVar[str] = "encoder.LayerNorm"
