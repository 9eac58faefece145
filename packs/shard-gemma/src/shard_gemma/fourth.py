"""How Gemma 4 is sharded: blocks that differ, and what each reads of the words beside the states."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from shard_gemma.policy import Gemma2Policy
from shard_llama.policy import LlamaPolicy
from shardcore.policy import HeadCounts, Heads, ModulePolicy, Rule
from shardcore.styles import attribute, enter_arg, experts, local_groups, norm, outputs, region, replicate, vocab

#: What makes a state for each token and block of the words, which a block adds to that of the blocks before it.
BESIDE = ("embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm")


class Gemma4Policy(Gemma2Policy):
    """Gemma 4 for text: blocks have KV heads of their own number, or read keys and values that another one made.

    Experts are beside the MLP of a block. What a block reads of the words beside the states is whole on every rank.
    """

    rms: ClassVar[str | None] = "eps"
    checks = (Heads("num_attention_heads", uneven=True),)  # those of keys and values are counted in each block
    stages = replace(LlamaPolicy.stages, first=("embed_tokens", *BESIDE), optional=BESIDE)

    def module_policy(self) -> ModulePolicy:
        """Return the rules of a decoder like Llama, and of what differs from block to block."""
        blocks = self.base.layers
        return {**super().module_policy(), **{block: self.own(block) for block in blocks}}

    def decoder(self) -> list[Rule]:
        """Return the rules of what is around the blocks; tokens stay together where they read more than the states."""
        config = self.model.config
        if not config.hidden_size_per_layer_input and not config.enable_moe_block:
            return super().decoder()
        table, projection, normalizes = BESIDE
        return [
            vocab("embed_tokens"),
            vocab(table, optional=True),
            replicate(projection, optional=True),
            norm(normalizes, rms=self.rms, optional=True),
            norm(self.final, rms=self.rms),
            outputs(attentions="heads"),
        ]

    def attention(self) -> list[Rule]:
        """Return no rules: attention differs from block to block."""
        return []

    def feed_forward(self) -> list[Rule]:
        """Return the rules of what follows the attention in a block, without its MLP."""
        after = ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2")
        return [
            replicate("router", optional=True),
            enter_arg("experts", "top_k_weights", optional=True),
            experts("experts", weights="", router=None, optional=True),
            replicate("per_layer_input_gate", "per_layer_projection", optional=True),
            norm("post_per_layer_input_norm", *after, rms=self.rms, optional=True),
        ]

    def own(self, block: Any) -> list[Rule]:
        """Return the rules of the attention and of the MLP of one block."""
        query, attention = self.model.config.num_attention_heads, block.self_attn
        kv = query // attention.num_key_value_groups
        heads = Heads(query, kv=kv, uneven=True)
        queries, keys, norms = (
            tuple(f"self_attn.{name}" for name, _ in attention.named_children() if name in names)
            for names in (("q_proj",), ("k_proj", "v_proj"), ("q_norm", "k_norm"))
        )

        def groups(counts: HeadCounts) -> int:
            return local_groups(replace(counts, kv=kv))

        return [
            region(enter="self_attn", col=queries, kv=keys, row="self_attn.o_proj", heads=heads, partial=norms),
            attribute("self_attn.num_key_value_groups", groups),
            *super().feed_forward(),
        ]
