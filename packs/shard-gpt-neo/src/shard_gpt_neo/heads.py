"""What each head adds to the policies of GPT-Neo and GPT-J."""

from __future__ import annotations

from typing import ClassVar

from shard_gpt_neo.policy import GPTJModelPolicy, GPTNeoModelPolicy
from shardcore.policy import ModulePolicy
from shardcore.styles import head, replicate

_NEO, _J = GPTNeoModelPolicy.stages, GPTJModelPolicy.stages


class GPTNeoForCausalLMPolicy(GPTNeoModelPolicy):
    """GPT-Neo with its language-model head, tied to the embedding."""

    stages = _NEO.under("transformer", then="lm_head")
    rules: ClassVar[ModulePolicy] = {"GPTNeoForCausalLM": [head("lm_head")]}


class GPTNeoForSequenceClassificationPolicy(GPTNeoModelPolicy):
    """GPT-Neo with a label for each sequence."""

    stages = _NEO.under("transformer", then="score")
    rules: ClassVar[ModulePolicy] = {"GPTNeoForSequenceClassification": [replicate("score")]}


class GPTNeoForTokenClassificationPolicy(GPTNeoModelPolicy):
    """GPT-Neo with a label for each token."""

    stages = _NEO.under("transformer", then=("dropout", "classifier"))
    rules: ClassVar[ModulePolicy] = {"GPTNeoForTokenClassification": [replicate("classifier")]}


class GPTNeoForQuestionAnsweringPolicy(GPTNeoModelPolicy):
    """GPT-Neo with start and end scores for each token."""

    stages = _NEO.under("transformer", then="qa_outputs")
    rules: ClassVar[ModulePolicy] = {"GPTNeoForQuestionAnswering": [replicate("qa_outputs")]}


class GPTJForCausalLMPolicy(GPTJModelPolicy):
    """GPT-J with its language-model head."""

    stages = _J.under("transformer", then="lm_head")
    rules: ClassVar[ModulePolicy] = {"GPTJForCausalLM": [head("lm_head")]}


class GPTJForSequenceClassificationPolicy(GPTJModelPolicy):
    """GPT-J with a label for each sequence."""

    stages = _J.under("transformer", then="score")
    rules: ClassVar[ModulePolicy] = {"GPTJForSequenceClassification": [replicate("score")]}


class GPTJForQuestionAnsweringPolicy(GPTJModelPolicy):
    """GPT-J with start and end scores for each token."""

    stages = _J.under("transformer", then="qa_outputs")
    rules: ClassVar[ModulePolicy] = {"GPTJForQuestionAnswering": [replicate("qa_outputs")]}
