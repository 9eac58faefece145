"""How RoBERTa and XLM-RoBERTa are sharded: like BERT, with heads of their own."""

from __future__ import annotations

from typing import ClassVar

import transformers
from packaging.version import Version

from shard_bert.before5 import rules_of
from shard_bert.heads import masked_lm_loss
from shard_bert.policy import BertModelPolicy
from shardcore.policy import ModulePolicy
from shardcore.styles import head, loss, norm, replicate

_OLD = Version(transformers.__version__) < Version("5")
_MODEL = BertModelPolicy.stages


class RobertaModelPolicy(BertModelPolicy):
    """The encoder, or with ``is_decoder`` the decoder, without a head."""

    family: ClassVar[str] = "Roberta"

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the model and of its head."""
        old = rules_of(self.family) if _OLD else {}
        return {**super().module_policy(), **old, **self.head()}

    def head(self) -> ModulePolicy:
        """Return the rules of the head."""
        return {}


class _Words(RobertaModelPolicy):
    """A head that scores words; its decoder is tied to the embedding, and its bias to a parameter beside it."""

    stages = _MODEL.under("roberta", then="lm_head")

    def head(self) -> ModulePolicy:
        """Return the rules of the head."""
        return {f"{self.family}LMHead": [replicate("dense"), norm("layer_norm"), head("decoder", bias="bias")]}


class RobertaForCausalLMPolicy(_Words):
    """The next word, of a decoder."""


class RobertaForMaskedLMPolicy(_Words):
    """Masked words."""

    def head(self) -> ModulePolicy:
        """Return the rules of the head and of its loss."""
        return {**super().head(), f"{self.family}ForMaskedLM": [loss(masked_lm_loss)]}


class RobertaForSequenceClassificationPolicy(RobertaModelPolicy):
    """A label for each sequence."""

    stages = _MODEL.under("roberta", then="classifier")

    def head(self) -> ModulePolicy:
        """Return the rules of the head."""
        return {f"{self.family}ClassificationHead": [replicate("dense", "out_proj")]}


class RobertaForMultipleChoicePolicy(RobertaModelPolicy):
    """A score for each choice."""

    stages = _MODEL.under("roberta", then=("dropout", "classifier"))

    def head(self) -> ModulePolicy:
        """Return the rules of the head."""
        return {f"{self.family}ForMultipleChoice": [replicate("classifier")]}


class RobertaForTokenClassificationPolicy(RobertaModelPolicy):
    """A label for each token."""

    stages = _MODEL.under("roberta", then=("dropout", "classifier"))

    def head(self) -> ModulePolicy:
        """Return the rules of the head."""
        return {f"{self.family}ForTokenClassification": [replicate("classifier")]}


class RobertaForQuestionAnsweringPolicy(RobertaModelPolicy):
    """Scores for where an answer starts and ends."""

    stages = _MODEL.under("roberta", then="qa_outputs")

    def head(self) -> ModulePolicy:
        """Return the rules of the head."""
        return {f"{self.family}ForQuestionAnswering": [replicate("qa_outputs")]}
