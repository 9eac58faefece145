"""How GLM and GLM-4 are sharded: like Llama, with one linear for both halves of the gated MLP."""

from __future__ import annotations

from shard_llama.policy import LlamaPolicy
from shardcore.policy import Heads, Rule
from shardcore.styles import region, segments


class GlmPolicy(LlamaPolicy):
    """GLM, with a head or without; any number of ranks share its heads."""

    checks = (Heads("num_attention_heads", kv="num_key_value_heads", uneven=True),)

    def feed_forward(self) -> list[Rule]:
        """Return the rules of the gated MLP."""
        return [region(enter="mlp", col=segments("mlp.gate_up_proj", 2), row="mlp.down_proj")]


class Glm4Policy(GlmPolicy):
    """GLM-4, with a head or without; it normalizes what attention and MLP return too."""

    norms = (*GlmPolicy.norms, "post_self_attn_layernorm", "post_mlp_layernorm")
