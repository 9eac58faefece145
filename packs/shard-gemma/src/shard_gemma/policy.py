"""How the Gemmas are sharded: like Llama, with norms around what Gemma 2 adds, and in Gemma 3 on queries and keys."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from shard_llama.policy import LlamaPolicy
from shardcore.policy import Heads


class GemmaPolicy(LlamaPolicy):
    """Gemma, with a head or without; any number of ranks share its heads."""

    rms: ClassVar[str | None] = None  # the norms multiply by 1 + weight
    checks = (Heads("num_attention_heads", kv="num_key_value_heads", uneven=True),)


class Gemma2Policy(GemmaPolicy):
    """Gemma 2, with a head or without."""

    norms = (*GemmaPolicy.norms, "pre_feedforward_layernorm", "post_feedforward_layernorm")


class Gemma3Policy(Gemma2Policy):
    """Gemma 3 for text, with a head or without."""

    head_norms = ("q_norm", "k_norm")
    # Before transformers 5 layers that see a window had tables of their own.
    stages = replace(LlamaPolicy.stages, everywhere=("rotary_emb", "rotary_emb_local"), optional="rotary_emb_local")
