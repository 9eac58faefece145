"""How Falcon is sharded: what every class of its modules needs.

Its generations differ in how many query heads share a KV head: a group in the new architecture (40B, 11B, 180B), all of
them with multi-query attention (7B), a single one in Falcon-RW. In one weight, group lies after group.
"""

from __future__ import annotations

from typing import Any

from shardcore.policy import HeadCounts, Heads, ModulePolicy, Stages
from shardcore.styles import (
    attribute,
    local_heads,
    local_kv_heads,
    norm,
    outputs,
    region,
    segments,
    sequence,
    slice_arg,
    vocab,
)
from shardcore_transformers import BaseModelPolicy


class _GroupedHeads(Heads):
    """What the attention counts: ``num_kv_heads`` says something else where all heads share one."""

    def counts(self, model: Any, ranks: int) -> HeadCounts | None:
        config = model.config
        shared = config.multi_query and not config.new_decoder_architecture
        return HeadCounts(query=config.num_attention_heads, kv=1 if shared else config.num_kv_heads, ranks=ranks)


class FalconPolicy(BaseModelPolicy):
    """The decoder, with a head or without; any number of ranks share its heads, unless it has ALiBi."""

    checks = (_GroupedHeads("num_attention_heads", kv="num_kv_heads", uneven=True),)
    stages = Stages(first="word_embeddings", blocks="h", last="ln_f", everywhere="rotary_emb")

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the decoder and of its head. Which norms a block has depends on its generation."""
        by_heads = ("alibi", "attention_mask")  # the mask holds ALiBi too; of both, dim -3 is that of heads
        return {
            "FalconModel": [
                vocab("word_embeddings"),
                norm("ln_f"),
                sequence(scatter="h[0]", gather="ln_f"),
                outputs(attentions="heads", hidden_states="sequence"),
            ],
            "FalconDecoderLayer": [
                norm("input_layernorm", "ln_attn", "ln_mlp", "post_attention_layernorm", optional=True),
                *(slice_arg("self_attention", name, -3) for name in by_heads if self.model.config.alibi),
                region(
                    enter="self_attention",
                    col=segments("self_attention.query_key_value", ("query", "key", "value"), by="group"),
                    row="self_attention.dense",
                    unit="head",
                ),
                attribute("self_attention.num_heads", local_heads),
                attribute("self_attention.num_kv_heads", local_kv_heads),
                region(enter="mlp", col="mlp.dense_h_to_4h", row="mlp.dense_4h_to_h"),
            ],
            **self.heads(),
        }
