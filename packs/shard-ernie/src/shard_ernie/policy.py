"""How ERNIE is sharded: as BERT, with embeddings of the task, under other names."""

from __future__ import annotations

from typing import ClassVar

from shard_bert import heads
from shard_bert.policy import BertModelPolicy
from shardcore.policy import Heads, ModulePolicy
from shardcore.styles import norm, replicate, vocab

__all__ = [
    "ErnieForCausalLMPolicy",
    "ErnieForMaskedLMPolicy",
    "ErnieForMultipleChoicePolicy",
    "ErnieForNextSentencePredictionPolicy",
    "ErnieForPreTrainingPolicy",
    "ErnieForQuestionAnsweringPolicy",
    "ErnieForSequenceClassificationPolicy",
    "ErnieForTokenClassificationPolicy",
    "ErnieModelPolicy",
]

_MODEL = BertModelPolicy.stages


class ErnieModelPolicy(BertModelPolicy):
    """The encoder, or with ``is_decoder`` the decoder, without a head; any number of ranks share its heads."""

    family: ClassVar[str] = "Ernie"
    checks = (Heads("num_attention_heads", uneven=True),)

    def module_policy(self) -> ModulePolicy:
        """Return the rules of BERT, also of a head, for the classes of ERNIE."""
        theirs = super().module_policy()
        embeddings = [
            vocab("word_embeddings"),
            replicate("position_embeddings", "token_type_embeddings"),
            replicate("task_type_embeddings", optional=True),
            norm("LayerNorm"),
        ]
        return {
            **{str(name).replace("Bert", "Ernie"): rules for name, rules in theirs.items()},
            "ErnieEmbeddings": embeddings,
        }


class ErnieForPreTrainingPolicy(ErnieModelPolicy, heads.BertForPreTrainingPolicy):
    """Masked words and the next sentence."""

    stages = _MODEL.under("ernie", then="cls")


class ErnieForMaskedLMPolicy(ErnieModelPolicy, heads.BertForMaskedLMPolicy):
    """Masked words."""

    stages = _MODEL.under("ernie", then="cls")


class ErnieForCausalLMPolicy(ErnieModelPolicy, heads.BertLMHeadModelPolicy):
    """The next word, of a decoder."""

    stages = _MODEL.under("ernie", then="cls")


class ErnieForNextSentencePredictionPolicy(ErnieModelPolicy, heads.BertForNextSentencePredictionPolicy):
    """The next sentence; its head holds its linear."""

    stages = _MODEL.under("ernie", then="cls")


class ErnieForSequenceClassificationPolicy(ErnieModelPolicy, heads.BertForSequenceClassificationPolicy):
    """A label for each sequence."""

    stages = _MODEL.under("ernie", then=("dropout", "classifier"))


class ErnieForMultipleChoicePolicy(ErnieModelPolicy, heads.BertForMultipleChoicePolicy):
    """A score for each choice."""

    stages = _MODEL.under("ernie", then=("dropout", "classifier"))


class ErnieForTokenClassificationPolicy(ErnieModelPolicy, heads.BertForTokenClassificationPolicy):
    """A label for each token."""

    stages = _MODEL.under("ernie", then=("dropout", "classifier"))


class ErnieForQuestionAnsweringPolicy(ErnieModelPolicy, heads.BertForQuestionAnsweringPolicy):
    """Scores for where an answer starts and ends."""

    stages = _MODEL.under("ernie", then="qa_outputs")
