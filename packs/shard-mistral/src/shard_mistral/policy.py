"""How Mistral and Mixtral are sharded: like Llama, and in Mixtral with experts in place of the MLP."""

from __future__ import annotations

from typing import Any, ClassVar

from shard_llama.policy import (
    LlamaForCausalLMPolicy,
    LlamaForQuestionAnsweringPolicy,
    LlamaForSequenceClassificationPolicy,
    LlamaForTokenClassificationPolicy,
    LlamaModelPolicy,
)
from shardcore.policy import ModulePolicy, Rule, Stages
from shardcore.styles import experts, refuse


class MistralModelPolicy(LlamaModelPolicy):
    """The decoder of Mistral without a head."""

    family: ClassVar[str] = "Mistral"


class MistralForCausalLMPolicy(MistralModelPolicy, LlamaForCausalLMPolicy):
    """Mistral with its language-model head."""


class MistralForSequenceClassificationPolicy(MistralModelPolicy, LlamaForSequenceClassificationPolicy):
    """Mistral with a label for each sequence."""


class MistralForTokenClassificationPolicy(MistralModelPolicy, LlamaForTokenClassificationPolicy):
    """Mistral with a label for each token."""


class MistralForQuestionAnsweringPolicy(MistralModelPolicy, LlamaForQuestionAnsweringPolicy):
    """Mistral with start and end scores for each token."""

    stages: ClassVar[Stages] = LlamaModelPolicy.stages.under("model", then="qa_outputs")


class MixtralModelPolicy(LlamaModelPolicy):
    """The decoder of Mixtral without a head."""

    family: ClassVar[str] = "Mixtral"

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the decoder, and of the experts: since transformers 5 one module, before a list."""
        jitter = "router_jitter_noise changes what entered the experts in place, which autograd refuses"
        return {
            **super().module_policy(),
            "MixtralSparseMoeBlock": [
                experts(captured=0, col=("w1", "w3"), row="w2"),
                refuse(_jitters, jitter, todo="set router_jitter_noise=0"),
            ],
        }

    def feed_forward(self) -> list[Rule]:
        """Return nothing: the experts have a class of their own."""
        return []


def _jitters(block: Any) -> bool:
    return bool(block.jitter_noise > 0)


class MixtralForCausalLMPolicy(MixtralModelPolicy, LlamaForCausalLMPolicy):
    """Mixtral with its language-model head."""


class MixtralForSequenceClassificationPolicy(MixtralModelPolicy, LlamaForSequenceClassificationPolicy):
    """Mixtral with a label for each sequence."""


class MixtralForTokenClassificationPolicy(MixtralModelPolicy, LlamaForTokenClassificationPolicy):
    """Mixtral with a label for each token."""


class MixtralForQuestionAnsweringPolicy(MixtralModelPolicy, LlamaForQuestionAnsweringPolicy):
    """Mixtral with start and end scores for each token."""

    stages: ClassVar[Stages] = LlamaModelPolicy.stages.under("model", then="qa_outputs")
