"""What each head of DeBERTa-v2 adds to the policy of the model."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from shard_bert.heads import masked_lm_loss
from shard_deberta.policy import DebertaV2ModelPolicy
from shardcore.policy import ModulePolicy
from shardcore.styles import head, loss, norm, refuse, replicate

__all__ = [
    "DebertaV2ForMaskedLMPolicy",
    "DebertaV2ForMultipleChoicePolicy",
    "DebertaV2ForQuestionAnsweringPolicy",
    "DebertaV2ForSequenceClassificationPolicy",
    "DebertaV2ForTokenClassificationPolicy",
]

_MODEL = DebertaV2ModelPolicy.stages


def _reads_the_table(model: nn.Module) -> bool:
    config: Any = model.config
    return not config.legacy


class DebertaV2ForMaskedLMPolicy(DebertaV2ModelPolicy):
    """Masked words; the decoder is tied to the embedding, and its bias to a parameter beside it."""

    stages = _MODEL.under("deberta", then="cls")
    rules: ClassVar[ModulePolicy] = {
        "LegacyDebertaV2PredictionHeadTransform": [replicate("dense"), norm("LayerNorm")],
        "LegacyDebertaV2LMPredictionHead": [head("decoder", bias="bias")],
        "DebertaV2ForMaskedLM": [
            refuse(
                _reads_the_table,
                "with legacy=False the head has no decoder: it multiplies by the embedding of words, which is split",
                todo="build the model with legacy=True",
            ),
            loss(masked_lm_loss),
        ],
    }


class DebertaV2ForSequenceClassificationPolicy(DebertaV2ModelPolicy):
    """A label for each sequence."""

    stages = _MODEL.under("deberta", then=("pooler", "dropout", "classifier"))
    rules: ClassVar[ModulePolicy] = {"DebertaV2ForSequenceClassification": [replicate("pooler", "classifier")]}


class DebertaV2ForMultipleChoicePolicy(DebertaV2ModelPolicy):
    """A score for each choice."""

    stages = _MODEL.under("deberta", then=("pooler", "dropout", "classifier"))
    rules: ClassVar[ModulePolicy] = {"DebertaV2ForMultipleChoice": [replicate("pooler", "classifier")]}


class DebertaV2ForTokenClassificationPolicy(DebertaV2ModelPolicy):
    """A label for each token."""

    stages = _MODEL.under("deberta", then=("dropout", "classifier"))
    rules: ClassVar[ModulePolicy] = {"DebertaV2ForTokenClassification": [replicate("classifier")]}


class DebertaV2ForQuestionAnsweringPolicy(DebertaV2ModelPolicy):
    """Scores for where an answer starts and ends."""

    stages = _MODEL.under("deberta", then="qa_outputs")
    rules: ClassVar[ModulePolicy] = {"DebertaV2ForQuestionAnswering": [replicate("qa_outputs")]}
