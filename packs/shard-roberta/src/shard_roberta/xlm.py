"""How XLM-RoBERTa is sharded: as RoBERTa, under other names."""

from __future__ import annotations

from typing import ClassVar

from shard_roberta import policy


class XLMRobertaModelPolicy(policy.RobertaModelPolicy):
    """The encoder, or with ``is_decoder`` the decoder, without a head."""

    family: ClassVar[str] = "XLMRoberta"


class XLMRobertaForCausalLMPolicy(XLMRobertaModelPolicy, policy.RobertaForCausalLMPolicy):
    """The next word, of a decoder."""


class XLMRobertaForMaskedLMPolicy(XLMRobertaModelPolicy, policy.RobertaForMaskedLMPolicy):
    """Masked words."""


class XLMRobertaForSequenceClassificationPolicy(XLMRobertaModelPolicy, policy.RobertaForSequenceClassificationPolicy):
    """A label for each sequence."""


class XLMRobertaForMultipleChoicePolicy(XLMRobertaModelPolicy, policy.RobertaForMultipleChoicePolicy):
    """A score for each choice."""


class XLMRobertaForTokenClassificationPolicy(XLMRobertaModelPolicy, policy.RobertaForTokenClassificationPolicy):
    """A label for each token."""


class XLMRobertaForQuestionAnsweringPolicy(XLMRobertaModelPolicy, policy.RobertaForQuestionAnsweringPolicy):
    """Scores for where an answer starts and ends."""
