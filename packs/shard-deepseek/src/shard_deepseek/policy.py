"""How DeepSeek-V2 and DeepSeek-V3 are sharded: latent attention, and experts in all but the first blocks."""

from __future__ import annotations

from typing import ClassVar

from shard_llama.policy import LlamaPolicy
from shardcore.policy import Heads, ModulePolicy, Rule
from shardcore.styles import experts, region, replicate

_COLUMNS, _ROW = ("gate_proj", "up_proj"), "down_proj"


class DeepseekV2Policy(LlamaPolicy):
    """DeepSeek-V2, with a head or without; any number of ranks share its heads."""

    family: ClassVar[str] = "DeepseekV2"
    #: The class of what routes tokens to experts, after the family's name.
    mixture: ClassVar[str] = "Moe"
    checks = (Heads("num_attention_heads", uneven=True),)

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the decoder and of the experts; every token visits the shared ones besides its own."""
        shared = tuple(f"shared_experts.{name}" for name in _COLUMNS)
        mixture = experts(captured=0, col=_COLUMNS, row=_ROW, shared_col=shared, shared_row=f"shared_experts.{_ROW}")
        return {**super().module_policy(), f"{self.family}{self.mixture}": [mixture]}

    def attention(self) -> list[Rule]:
        """Return the rules of the latent attention: what replicated linears make of the tokens enters.

        The latent states become keys and values of this rank's heads, and the rotary key beside them is that of all
        heads. Queries come from latent states of their own, or from the tokens.
        """
        latent = self.model.config.q_lora_rank is not None
        first, queries = ("q_a_proj", "q_b_proj") if latent else ("q_proj", "q_proj")
        whole = ("kv_a_proj_with_mqa", *(["q_a_proj"] if latent else []))
        norms = ("kv_a_layernorm", *(["q_a_layernorm"] if latent else []))
        return [
            region(
                enter=_below("self_attn", first, "kv_a_proj_with_mqa"),
                col=_below("self_attn", queries, "kv_b_proj"),
                row="self_attn.o_proj",
                unit="head",
                partial=_below("self_attn", *norms),
            ),
            replicate(*_below("self_attn", *whole)),
        ]

    def feed_forward(self) -> list[Rule]:
        """Return the rules of the MLP of the blocks that have one; experts have a class of their own."""
        return [region(enter="mlp", col=_below("mlp", *_COLUMNS), row=f"mlp.{_ROW}", optional=True)]


def _below(module: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{module}.{name}" for name in names)


class DeepseekV3Policy(DeepseekV2Policy):
    """DeepSeek-V3 and DeepSeek-R1, with a head or without."""

    family: ClassVar[str] = "DeepseekV3"
    mixture: ClassVar[str] = "MoE"
