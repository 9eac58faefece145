"""What each head of T5 adds to encoder and decoder."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from shard_t5.policy import T5EncoderModelPolicy, T5ModelPolicy
from shardcore.policy import ModulePolicy, Rule
from shardcore.styles import head, replicate

__all__ = [
    "T5ForConditionalGenerationPolicy",
    "T5ForQuestionAnsweringPolicy",
    "T5ForSequenceClassificationPolicy",
    "T5ForTokenClassificationPolicy",
]

_MODEL = T5ModelPolicy.stages


class T5ForConditionalGenerationPolicy(T5ModelPolicy):
    """Text to text; the head is tied to the embedding, or of its own since T5 1.1."""

    holder: ClassVar[str] = "ForConditionalGeneration"
    beside: ClassVar[tuple[Rule, ...]] = (head("lm_head"),)
    stages = replace(_MODEL, last=("decoder.final_layer_norm", "lm_head"))


class T5ForQuestionAnsweringPolicy(T5ModelPolicy):
    """Scores for where an answer starts and ends."""

    holder: ClassVar[str] = "ForQuestionAnswering"
    beside: ClassVar[tuple[Rule, ...]] = (replicate("qa_outputs"),)
    stages = replace(_MODEL, last=("decoder.final_layer_norm", "qa_outputs"))


class T5ForSequenceClassificationPolicy(T5ModelPolicy):
    """A label for each sequence."""

    stages = _MODEL.under("transformer", then="classification_head")

    def head(self) -> ModulePolicy:
        """Return the rules of the head."""
        return {f"{self.family}ClassificationHead": [replicate("dense", "out_proj")]}


class T5ForTokenClassificationPolicy(T5EncoderModelPolicy):
    """A label for each token, by the encoder alone."""

    stages = T5EncoderModelPolicy.stages.under("transformer", then="classifier")

    def head(self) -> ModulePolicy:
        """Return the rules of the head."""
        return {f"{self.family}ForTokenClassification": [replicate("classifier")]}
