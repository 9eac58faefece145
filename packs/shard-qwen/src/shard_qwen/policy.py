"""How Qwen2 and Qwen3 are sharded: like Llama, and in Qwen3 with norms on the queries and keys of every head."""

from __future__ import annotations

from typing import ClassVar

from shard_llama.policy import (
    LlamaForCausalLMPolicy,
    LlamaForQuestionAnsweringPolicy,
    LlamaForSequenceClassificationPolicy,
    LlamaForTokenClassificationPolicy,
    LlamaModelPolicy,
)


class Qwen2ModelPolicy(LlamaModelPolicy):
    """The decoder of Qwen2, Qwen2.5 and QwQ without a head."""

    family: ClassVar[str] = "Qwen2"


class Qwen2ForCausalLMPolicy(Qwen2ModelPolicy, LlamaForCausalLMPolicy):
    """Qwen2 with its language-model head."""


class Qwen2ForSequenceClassificationPolicy(Qwen2ModelPolicy, LlamaForSequenceClassificationPolicy):
    """Qwen2 with a label for each sequence."""


class Qwen2ForTokenClassificationPolicy(Qwen2ModelPolicy, LlamaForTokenClassificationPolicy):
    """Qwen2 with a label for each token."""


class Qwen2ForQuestionAnsweringPolicy(Qwen2ModelPolicy, LlamaForQuestionAnsweringPolicy):
    """Qwen2 with start and end scores for each token."""


class Qwen3ModelPolicy(LlamaModelPolicy):
    """The decoder of Qwen3 without a head."""

    family: ClassVar[str] = "Qwen3"
    head_norms: ClassVar[tuple[str, ...]] = ("q_norm", "k_norm")


class Qwen3ForCausalLMPolicy(Qwen3ModelPolicy, LlamaForCausalLMPolicy):
    """Qwen3 with its language-model head."""


class Qwen3ForSequenceClassificationPolicy(Qwen3ModelPolicy, LlamaForSequenceClassificationPolicy):
    """Qwen3 with a label for each sequence."""


class Qwen3ForTokenClassificationPolicy(Qwen3ModelPolicy, LlamaForTokenClassificationPolicy):
    """Qwen3 with a label for each token."""


class Qwen3ForQuestionAnsweringPolicy(Qwen3ModelPolicy, LlamaForQuestionAnsweringPolicy):
    """Qwen3 with start and end scores for each token."""
