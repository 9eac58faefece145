"""What each head adds to ALBERT."""

from __future__ import annotations

from typing import ClassVar

from shard_albert.policy import AlbertModelPolicy
from shard_bert.heads import masked_lm_loss, pretraining_loss
from shardcore.policy import ModulePolicy
from shardcore.styles import head, loss, norm, replicate

_MODEL = AlbertModelPolicy.stages

#: The decoder is tied to the embedding, and its bias to a parameter beside it.
_VOCABULARY: ModulePolicy = {"AlbertMLMHead": [replicate("dense"), norm("LayerNorm"), head("decoder", bias="bias")]}


class AlbertForPreTrainingPolicy(AlbertModelPolicy):
    """Masked words and the order of sentences."""

    stages = _MODEL.under("albert", then=("predictions", "sop_classifier"))
    rules: ClassVar[ModulePolicy] = {
        **_VOCABULARY,
        "AlbertSOPHead": [replicate("classifier")],
        "AlbertForPreTraining": [
            loss(
                pretraining_loss,
                labels=("labels", "sentence_order_label"),
                logits=("prediction_logits", "sop_logits"),
            )
        ],
    }


class AlbertForMaskedLMPolicy(AlbertModelPolicy):
    """Masked words."""

    stages = _MODEL.under("albert", then="predictions")
    rules: ClassVar[ModulePolicy] = {**_VOCABULARY, "AlbertForMaskedLM": [loss(masked_lm_loss)]}


class _Classifies(AlbertModelPolicy):
    """A head with few labels."""

    stages = _MODEL.under("albert", then=("dropout", "classifier"))


class AlbertForSequenceClassificationPolicy(_Classifies):
    """A label for each sequence."""

    rules: ClassVar[ModulePolicy] = {"AlbertForSequenceClassification": [replicate("classifier")]}


class AlbertForTokenClassificationPolicy(_Classifies):
    """A label for each token."""

    rules: ClassVar[ModulePolicy] = {"AlbertForTokenClassification": [replicate("classifier")]}


class AlbertForMultipleChoicePolicy(_Classifies):
    """A score for each choice."""

    rules: ClassVar[ModulePolicy] = {"AlbertForMultipleChoice": [replicate("classifier")]}


class AlbertForQuestionAnsweringPolicy(AlbertModelPolicy):
    """Scores for where an answer starts and ends."""

    stages = _MODEL.under("albert", then="qa_outputs")
    rules: ClassVar[ModulePolicy] = {"AlbertForQuestionAnswering": [replicate("qa_outputs")]}
