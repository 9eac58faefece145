"""How Mixtral is sharded: like Llama, with experts in place of the MLP. The policy of Mistral is that of Llama."""

from __future__ import annotations

from typing import Any

from shard_llama.policy import LlamaPolicy
from shardcore.policy import ModulePolicy, Rule
from shardcore.styles import experts, refuse


class MixtralPolicy(LlamaPolicy):
    """Mixtral, with a head or without."""

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
