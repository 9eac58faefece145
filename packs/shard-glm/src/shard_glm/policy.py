"""How GLM and GLM-4 are sharded: like Llama, with one linear for both halves of the gated MLP."""

from __future__ import annotations

from typing import ClassVar

from shard_llama.policy import (
    LlamaForCausalLMPolicy,
    LlamaForSequenceClassificationPolicy,
    LlamaForTokenClassificationPolicy,
    LlamaModelPolicy,
)
from shardcore.policy import Heads, Rule
from shardcore.styles import norm, region, segments


class GlmModelPolicy(LlamaModelPolicy):
    """The decoder of GLM without a head; any number of ranks share its heads."""

    family: ClassVar[str] = "Glm"
    checks = (Heads("num_attention_heads", kv="num_key_value_heads", uneven=True),)

    def feed_forward(self) -> list[Rule]:
        """Return the rules of the gated MLP."""
        return [region(enter="mlp", col=segments("mlp.gate_up_proj", 2), row="mlp.down_proj")]


class GlmForCausalLMPolicy(GlmModelPolicy, LlamaForCausalLMPolicy):
    """GLM with its language-model head."""


class GlmForSequenceClassificationPolicy(GlmModelPolicy, LlamaForSequenceClassificationPolicy):
    """GLM with a label for each sequence."""


class GlmForTokenClassificationPolicy(GlmModelPolicy, LlamaForTokenClassificationPolicy):
    """GLM with a label for each token."""


class Glm4ModelPolicy(GlmModelPolicy):
    """The decoder of GLM-4 without a head."""

    family: ClassVar[str] = "Glm4"

    def block(self) -> list[Rule]:
        """Return the rules of one block, which normalizes what attention and MLP return too."""
        return [*super().block(), norm("post_self_attn_layernorm", "post_mlp_layernorm", rms=self.rms)]


class Glm4ForCausalLMPolicy(Glm4ModelPolicy, LlamaForCausalLMPolicy):
    """GLM-4 with its language-model head."""


class Glm4ForSequenceClassificationPolicy(Glm4ModelPolicy, LlamaForSequenceClassificationPolicy):
    """GLM-4 with a label for each sequence."""


class Glm4ForTokenClassificationPolicy(Glm4ModelPolicy, LlamaForTokenClassificationPolicy):
    """GLM-4 with a label for each token."""
