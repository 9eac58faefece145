"""How Qwen3-Next and Qwen3.5 are sharded: gated delta nets in most of their blocks."""

from __future__ import annotations

from typing import Any, ClassVar

from shard_hybrids.policy import HybridPolicy, features
from shard_qwen.policy import Qwen2MoePolicy
from shardcore.policy import Heads, Rule
from shardcore.styles import attribute, by_heads, local_heads, local_kv_heads, region, segments


class Qwen35Policy(HybridPolicy):
    """Qwen3.5. The heads of a delta net are those of its values; keys and queries are shared by several of them."""

    rms: ClassVar[str | None] = None  # the norms multiply by 1 + weight
    head_norms = ("q_norm", "k_norm")
    mixer: ClassVar[str] = "Qwen3_5GatedDeltaNet"
    checks = (
        *HybridPolicy.checks,
        Heads("linear_num_value_heads", kv="linear_num_key_heads", of="Qwen3_5GatedDeltaNet"),
    )

    def projections(self, key: int, value: int) -> tuple[Any, ...]:
        """Return the linears of a delta net, whose keys and values have so many features."""
        fused = segments("in_proj_qkv", ("key", "key", "query"), sizes=(key, key, value))
        return fused, "in_proj_z", "in_proj_b", "in_proj_a"

    def mixing(self) -> list[Rule]:
        """Return the rules of a delta net."""
        config = self.model.config
        key, value = config.linear_key_head_dim, config.linear_value_head_dim
        channels = segments("conv1d", ("key", "key", "query"), sizes=(key, key, value))
        return [
            region(
                enter="",
                col=self.projections(key, value),
                row="out_proj",
                unit="head",
                partial=("norm", channels),
            ),
            by_heads("dt_bias", "A_log"),
            attribute("num_v_heads", local_heads),
            attribute("num_k_heads", local_kv_heads),
            attribute("key_dim", features(kv=key)),
            attribute("value_dim", features(query=value)),
        ]


class Qwen35MoePolicy(Qwen35Policy, Qwen2MoePolicy):
    """Qwen3.5 with experts."""

    mixer: ClassVar[str] = "Qwen3_5MoeGatedDeltaNet"
    checks = (*HybridPolicy.checks, Heads("linear_num_value_heads", kv="linear_num_key_heads", of=mixer))


class Qwen3NextPolicy(Qwen35MoePolicy):
    """Qwen3-Next: what it projects lies beside each other for each head of keys."""

    mixer: ClassVar[str] = "Qwen3NextGatedDeltaNet"
    checks = (*HybridPolicy.checks, Heads("linear_num_value_heads", kv="linear_num_key_heads", of=mixer))

    def projections(self, key: int, value: int) -> tuple[Any, ...]:
        """Return the linears of a delta net, whose keys and values have so many features."""
        sizes = (key, key, value, value)
        return (
            segments("in_proj_qkvz", ("key", "key", "query", "query"), by="group", sizes=sizes),
            segments("in_proj_ba", ("query", "query"), by="group", sizes=(1, 1)),
        )
