"""What each head of BERT adds to the policy of the model."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from torch.nn.functional import cross_entropy

from shard_bert.policy import BertModelPolicy
from shardcore.policy import ModulePolicy
from shardcore.styles import head, loss, norm, replicate

_MODEL = BertModelPolicy.stages

#: The decoder is tied to the embedding, and its bias to a parameter of the module around it.
_VOCABULARY: ModulePolicy = {
    "BertPredictionHeadTransform": [replicate("dense"), norm("LayerNorm")],
    "BertLMPredictionHead": [head("decoder", bias="bias")],
}


def masked_lm_loss(model: Any, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of words (B, S, V) against their labels (B, S), -100 where nothing was masked."""
    return cross_entropy(logits.flatten(0, -2), labels.flatten())


def pretraining_loss(model: Any, words: Tensor, order: Tensor, labels: Tensor, follows: Tensor | None) -> Tensor | None:
    """Return the sum of both losses, or None if only one of them could be computed."""
    return None if follows is None else masked_lm_loss(model, words, labels) + cross_entropy(order, follows.flatten())


class BertForPreTrainingPolicy(BertModelPolicy):
    """Masked words and the next sentence."""

    stages = _MODEL.under("bert", then="cls")
    rules: ClassVar[ModulePolicy] = {
        **_VOCABULARY,
        "BertPreTrainingHeads": [replicate("seq_relationship")],
        "BertForPreTraining": [
            loss(
                pretraining_loss,
                labels=("labels", "next_sentence_label"),
                logits=("prediction_logits", "seq_relationship_logits"),
            )
        ],
    }


class BertForMaskedLMPolicy(BertModelPolicy):
    """Masked words."""

    stages = _MODEL.under("bert", then="cls")
    rules: ClassVar[ModulePolicy] = {**_VOCABULARY, "BertForMaskedLM": [loss(masked_lm_loss)]}


class BertLMHeadModelPolicy(BertModelPolicy):
    """The next word, of a decoder; its loss is the model's own ``loss_function``, of gathered logits."""

    stages = _MODEL.under("bert", then="cls")
    rules: ClassVar[ModulePolicy] = _VOCABULARY


class BertForNextSentencePredictionPolicy(BertModelPolicy):
    """The next sentence."""

    stages = _MODEL.under("bert", then="cls")
    rules: ClassVar[ModulePolicy] = {"BertForNextSentencePrediction": [replicate("cls")]}


class BertForSequenceClassificationPolicy(BertModelPolicy):
    """A label for each sequence."""

    stages = _MODEL.under("bert", then=("dropout", "classifier"))
    rules: ClassVar[ModulePolicy] = {"BertForSequenceClassification": [replicate("classifier")]}


class BertForMultipleChoicePolicy(BertModelPolicy):
    """A score for each choice."""

    stages = _MODEL.under("bert", then=("dropout", "classifier"))
    rules: ClassVar[ModulePolicy] = {"BertForMultipleChoice": [replicate("classifier")]}


class BertForTokenClassificationPolicy(BertModelPolicy):
    """A label for each token."""

    stages = _MODEL.under("bert", then=("dropout", "classifier"))
    rules: ClassVar[ModulePolicy] = {"BertForTokenClassification": [replicate("classifier")]}


class BertForQuestionAnsweringPolicy(BertModelPolicy):
    """Scores for where an answer starts and ends."""

    stages = _MODEL.under("bert", then="qa_outputs")
    rules: ClassVar[ModulePolicy] = {"BertForQuestionAnswering": [replicate("qa_outputs")]}
