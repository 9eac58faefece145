"""How the mixtures of experts of Qwen2 and Qwen3 are sharded: like the dense models, with experts for most MLPs."""

from __future__ import annotations

from typing import ClassVar

from shard_llama.policy import LlamaPolicy
from shard_qwen.policy import Qwen2Policy, Qwen3Policy
from shardcore.policy import ModulePolicy, Rule
from shardcore.styles import experts, partial, region

_COLUMNS, _ROW = ("gate_proj", "up_proj"), "down_proj"


class _Mixture(LlamaPolicy):
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


class Qwen2MoePolicy(_Mixture, Qwen2Policy):
    """Qwen2-MoE, with a head or without; every token visits one expert besides its own."""

    family: ClassVar[str] = "Qwen2Moe"

    def mixture(self) -> list[Rule]:
        """Return the rules of the module that routes tokens to experts."""
        columns = tuple(f"shared_expert.{name}" for name in _COLUMNS)
        return [
            experts(captured=0, col=_COLUMNS, row=_ROW, shared_col=columns, shared_row=f"shared_expert.{_ROW}"),
            partial("shared_expert_gate"),
        ]


class Qwen3MoePolicy(_Mixture, Qwen3Policy):
    """Qwen3-MoE, with a head or without."""

    family: ClassVar[str] = "Qwen3Moe"
