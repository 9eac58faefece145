"""How the mixtures of experts of Qwen2 and Qwen3 are sharded: like the dense models, with experts for most MLPs."""

from __future__ import annotations

from typing import ClassVar

from shard_llama.policy import (
    LlamaForCausalLMPolicy,
    LlamaForQuestionAnsweringPolicy,
    LlamaForSequenceClassificationPolicy,
    LlamaForTokenClassificationPolicy,
    LlamaModelPolicy,
)
from shard_qwen.policy import Qwen2ModelPolicy, Qwen3ModelPolicy
from shardcore.policy import ModulePolicy, Rule, Stages
from shardcore.styles import experts, partial, region

_COLUMNS, _ROW = ("gate_proj", "up_proj"), "down_proj"


class _Mixture(LlamaModelPolicy):
    """A decoder with experts in some blocks and an MLP in the others."""

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the decoder, and of the experts: since transformers 5 one module, before a list."""
        return {**super().module_policy(), f"{self.family}SparseMoeBlock": self.mixture()}

    def mixture(self) -> list[Rule]:
        """Return the rules of the module that routes tokens to experts."""
        return [experts(captured=0, col=_COLUMNS, row=_ROW)]

    def feed_forward(self) -> list[Rule]:
        """Return the rules of the MLP of the blocks that have one; experts have a class of their own."""
        columns = tuple(f"mlp.{name}" for name in _COLUMNS)
        return [region(enter="mlp", col=columns, row=f"mlp.{_ROW}", optional=True)]


class Qwen2MoeModelPolicy(_Mixture, Qwen2ModelPolicy):
    """The decoder of Qwen2-MoE without a head; every token visits one expert besides its own."""

    family: ClassVar[str] = "Qwen2Moe"

    def mixture(self) -> list[Rule]:
        """Return the rules of the module that routes tokens to experts."""
        columns = tuple(f"shared_expert.{name}" for name in _COLUMNS)
        return [
            experts(captured=0, col=_COLUMNS, row=_ROW, shared_col=columns, shared_row=f"shared_expert.{_ROW}"),
            partial("shared_expert_gate"),
        ]


class Qwen2MoeForCausalLMPolicy(Qwen2MoeModelPolicy, LlamaForCausalLMPolicy):
    """Qwen2-MoE with its language-model head."""


class Qwen2MoeForSequenceClassificationPolicy(Qwen2MoeModelPolicy, LlamaForSequenceClassificationPolicy):
    """Qwen2-MoE with a label for each sequence."""


class Qwen2MoeForTokenClassificationPolicy(Qwen2MoeModelPolicy, LlamaForTokenClassificationPolicy):
    """Qwen2-MoE with a label for each token."""


class Qwen2MoeForQuestionAnsweringPolicy(Qwen2MoeModelPolicy, LlamaForQuestionAnsweringPolicy):
    """Qwen2-MoE with start and end scores for each token."""

    stages: ClassVar[Stages] = LlamaModelPolicy.stages.under("model", then="qa_outputs")


class Qwen3MoeModelPolicy(_Mixture, Qwen3ModelPolicy):
    """The decoder of Qwen3-MoE without a head."""

    family: ClassVar[str] = "Qwen3Moe"


class Qwen3MoeForCausalLMPolicy(Qwen3MoeModelPolicy, LlamaForCausalLMPolicy):
    """Qwen3-MoE with its language-model head."""


class Qwen3MoeForSequenceClassificationPolicy(Qwen3MoeModelPolicy, LlamaForSequenceClassificationPolicy):
    """Qwen3-MoE with a label for each sequence."""


class Qwen3MoeForTokenClassificationPolicy(Qwen3MoeModelPolicy, LlamaForTokenClassificationPolicy):
    """Qwen3-MoE with a label for each token."""


class Qwen3MoeForQuestionAnsweringPolicy(Qwen3MoeModelPolicy, LlamaForQuestionAnsweringPolicy):
    """Qwen3-MoE with start and end scores for each token."""
