"""What each head of BART adds to encoder and decoder."""

from __future__ import annotations

from typing import ClassVar

from shard_bart.policy import BartDecoderPolicy, BartModelPolicy
from shardcore.policy import ModulePolicy
from shardcore.styles import head, replicate

__all__ = [
    "BartForCausalLMPolicy",
    "BartForConditionalGenerationPolicy",
    "BartForQuestionAnsweringPolicy",
    "BartForSequenceClassificationPolicy",
]


class BartForConditionalGenerationPolicy(BartModelPolicy):
    """Text to text; a buffer that every rank holds is added to the scores of words."""

    #: How the name of the class ends.
    name: ClassVar[str] = "ForConditionalGeneration"
    stages = BartModelPolicy.stages.under("model", then=("lm_head", "final_logits_bias"))

    def head(self) -> ModulePolicy:
        """Return the rule of the head."""
        return {f"{self.family}{self.name}": [head("lm_head")]}


class BartForCausalLMPolicy(BartDecoderPolicy):
    """The decoder alone, as a language model."""

    stages = BartDecoderPolicy.stages.under("model.decoder", then="lm_head")

    def head(self) -> ModulePolicy:
        """Return the rule of the head."""
        return {f"{self.family}ForCausalLM": [head("lm_head")]}


class BartForSequenceClassificationPolicy(BartModelPolicy):
    """A label for each sequence."""

    stages = BartModelPolicy.stages.under("model", then="classification_head")

    def head(self) -> ModulePolicy:
        """Return the rules of the head."""
        return {f"{self.family}ClassificationHead": [replicate("dense", "out_proj")]}


class BartForQuestionAnsweringPolicy(BartModelPolicy):
    """Scores for where an answer starts and ends."""

    stages = BartModelPolicy.stages.under("model", then="qa_outputs")

    def head(self) -> ModulePolicy:
        """Return the rule of the head."""
        return {f"{self.family}ForQuestionAnswering": [replicate("qa_outputs")]}
