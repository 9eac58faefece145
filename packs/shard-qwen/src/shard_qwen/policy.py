"""How Qwen3 and the mixtures of experts are sharded: like Llama, but for this. The policy of Qwen2 is that of Llama."""

from __future__ import annotations

from typing import ClassVar

from shard_llama.mixtures import MixturePolicy
from shard_llama.policy import LlamaPolicy
from shardcore.policy import Rule
from shardcore.styles import partial


class Qwen3Policy(LlamaPolicy):
    """Qwen3: norms on the queries and keys of every head."""

    head_norms = ("q_norm", "k_norm")


class Qwen2MoePolicy(MixturePolicy):
    """Qwen2-MoE: how much of the expert that every token visits goes on is decided by a gate of its own."""

    shared: ClassVar[str | None] = "shared_expert"

    def feed_forward(self) -> list[Rule]:
        """Return the rules of what follows the attention in a block."""
        return [*super().feed_forward(), partial("mlp.shared_expert_gate", optional=True)]


class Qwen3MoePolicy(MixturePolicy, Qwen3Policy):
    """Qwen3-MoE: Qwen3 with experts."""
