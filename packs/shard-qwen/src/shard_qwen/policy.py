"""How Qwen2 and Qwen3 are sharded: like Llama, and in Qwen3 with norms on the queries and keys of every head."""

from __future__ import annotations

from typing import ClassVar

from shard_llama.policy import LlamaPolicy


class Qwen2Policy(LlamaPolicy):
    """Qwen2, Qwen2.5 and QwQ, with a head or without."""

    family: ClassVar[str] = "Qwen2"


class Qwen3Policy(LlamaPolicy):
    """Qwen3, with a head or without."""

    family: ClassVar[str] = "Qwen3"
    head_norms = ("q_norm", "k_norm")
