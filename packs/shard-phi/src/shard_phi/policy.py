"""How Phi and Phi-3 are sharded: Phi-3 is Llama with fused linears; Phi's attention and MLP read the same tokens."""

from __future__ import annotations

from typing import ClassVar

from shard_llama.policy import LlamaPolicy
from shardcore.policy import Heads, Rule, Stages
from shardcore.styles import (
    attribute,
    local_groups,
    local_heads,
    local_kv_heads,
    norm,
    partial,
    region,
    segments,
)

_HEADS = (Heads("num_attention_heads", kv="num_key_value_heads", uneven=True),)


class PhiPolicy(LlamaPolicy):
    """Phi-1, Phi-1.5 and Phi-2, with a head or without; any number of ranks share its heads."""

    final: ClassVar[str] = "final_layernorm"
    checks = _HEADS
    stages = Stages(
        first=("embed_tokens", "embed_dropout"), blocks="layers", last="final_layernorm", everywhere="rotary_emb"
    )

    def block(self) -> list[Rule]:
        """Return the rules of one block: attention and MLP are two regions that the same normalized tokens enter."""
        q, k, v = (f"self_attn.{name}_proj" for name in "qkv")
        return [
            norm("input_layernorm"),
            region(enter="self_attn", col=q, kv=(k, v), row="self_attn.dense", unit="head"),
            attribute("self_attn.num_key_value_groups", local_groups),
            partial("self_attn.q_layernorm", "self_attn.k_layernorm", optional=True),
            region(enter="mlp", col="mlp.fc1", row="mlp.fc2"),
        ]


class Phi3Policy(LlamaPolicy):
    """Phi-3, Phi-3.5 and Phi-4, with a head or without; any number of ranks share its heads."""

    checks = _HEADS

    def attention(self) -> list[Rule]:
        """Return the rules of the attention, which counts heads to cut its queries, keys and values apart."""
        qkv = segments("self_attn.qkv_proj", ("query", "key", "value"))
        return [
            region(enter="self_attn", col=qkv, row="self_attn.o_proj", unit="head"),
            attribute("self_attn.config.num_attention_heads", local_heads),
            attribute("self_attn.num_key_value_heads", local_kv_heads),
            attribute("self_attn.num_key_value_groups", local_groups),
        ]

    def feed_forward(self) -> list[Rule]:
        """Return the rules of the gated MLP."""
        return [region(enter="mlp", col=segments("mlp.gate_up_proj", 2), row="mlp.down_proj")]
