"""How ModernBERT is sharded: what every class of its modules needs, and what each head adds."""

from __future__ import annotations

from typing import ClassVar

from shardcore.policy import Heads, ModulePolicy, Stages
from shardcore.styles import head, norm, outputs, region, replicate, segments, sequence, vocab
from shardcore_transformers import PretrainedPolicy

__all__ = [
    "ModernBertForMaskedLMPolicy",
    "ModernBertForMultipleChoicePolicy",
    "ModernBertForQuestionAnsweringPolicy",
    "ModernBertForSequenceClassificationPolicy",
    "ModernBertForTokenClassificationPolicy",
    "ModernBertModelPolicy",
]


class ModernBertModelPolicy(PretrainedPolicy):
    """The encoder without a head; any number of ranks share its heads."""

    checks = (Heads("num_attention_heads", uneven=True),)
    stages = Stages(first="embeddings", blocks="layers", last="final_norm", everywhere="rotary_emb")
    #: What a head adds.
    rules: ClassVar[ModulePolicy] = {}

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
            **self.rules,
        }


_MODEL = ModernBertModelPolicy.stages

#: What is between the encoder and the scores of every head.
_TRANSFORM: ModulePolicy = {"ModernBertPredictionHead": [replicate("dense"), norm("norm")]}


class ModernBertForMaskedLMPolicy(ModernBertModelPolicy):
    """Masked words; the decoder is tied to the embedding, its bias is its own."""

    stages = _MODEL.under("model", then=("head", "decoder"))
    rules: ClassVar[ModulePolicy] = {**_TRANSFORM, "ModernBertForMaskedLM": [head("decoder")]}


class _Classifies(ModernBertModelPolicy):
    """A head with few labels."""

    stages = _MODEL.under("model", then=("head", "drop", "classifier"))


class ModernBertForSequenceClassificationPolicy(_Classifies):
    """A label for each sequence."""

    rules: ClassVar[ModulePolicy] = {**_TRANSFORM, "ModernBertForSequenceClassification": [replicate("classifier")]}


class ModernBertForTokenClassificationPolicy(_Classifies):
    """A label for each token."""

    rules: ClassVar[ModulePolicy] = {**_TRANSFORM, "ModernBertForTokenClassification": [replicate("classifier")]}


class ModernBertForQuestionAnsweringPolicy(_Classifies):
    """Scores for where an answer starts and ends."""

    rules: ClassVar[ModulePolicy] = {**_TRANSFORM, "ModernBertForQuestionAnswering": [replicate("classifier")]}


class ModernBertForMultipleChoicePolicy(_Classifies):
    """A score for each choice."""

    rules: ClassVar[ModulePolicy] = {**_TRANSFORM, "ModernBertForMultipleChoice": [replicate("classifier")]}
