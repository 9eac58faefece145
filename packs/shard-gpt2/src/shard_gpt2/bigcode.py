"""How GPTBigCode (SantaCoder, StarCoder) is sharded: the blocks of GPT-2, in which all heads may share one KV head.

In one weight, the queries of a KV head lie before its key and its value.
"""

from __future__ import annotations

from typing import Any

from shardcore.policy import HeadCounts, Heads, ModulePolicy, Stages
from shardcore.styles import attribute, norm, outputs, per_rank, region, replicate, segments, sequence, vocab
from shardcore_transformers import BaseModelPolicy


class _SharedHeads(Heads):
    """What the attention counts: one KV head for all query heads, or one for each."""

    def counts(self, model: Any, ranks: int) -> HeadCounts | None:
        query = model.config.num_attention_heads
        return HeadCounts(query=query, kv=1 if model.config.multi_query else query, ranks=ranks)


class GPTBigCodePolicy(BaseModelPolicy):
    """The decoder, with a head or without."""

    checks = (_SharedHeads("num_attention_heads"),)
    stages = Stages(
        first=("wte", "wpe", "drop"), blocks="h", last="ln_f", everywhere="bias"
    )  # a mask that nothing reads
    labels = ("score", "classifier")

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the decoder and of its head."""
        of_heads = ("embed_dim", "num_heads", *(["num_key_value_groups"] if self.model.config.multi_query else []))
        return {
            "GPTBigCodeModel": [
                vocab("wte"),
                replicate("wpe"),
                norm("ln_f"),
                sequence(scatter="h[0]", gather="ln_f"),
                outputs(attentions="heads", hidden_states="sequence"),
            ],
            "GPTBigCodeBlock": [
                norm("ln_1", "ln_2"),
                region(
                    enter="attn",
                    col=segments("attn.c_attn", ("query", "key", "value"), by="group"),
                    row="attn.c_proj",
                    unit="head",
                ),
                region(enter="mlp", col="mlp.c_fc", row="mlp.c_proj"),
            ],
            "GPTBigCodeAttention": [attribute(name, per_rank) for name in of_heads],
            **self.heads(),
        }
