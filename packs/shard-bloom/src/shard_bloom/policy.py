"""How BLOOM is sharded: what every class of its modules needs.

The attention and the MLP add the residual connection themselves, which they are given apart from what their linears
take: that alone enters the region, and the connection has the tokens of this rank.
"""

from __future__ import annotations

from torch import nn

from shardcore.policy import Heads, ModulePolicy, Stages
from shardcore.styles import (
    attribute,
    norm,
    outputs,
    per_rank,
    refuse,
    region,
    segments,
    sequence,
    slice_arg,
    vocab,
)
from shardcore_transformers import BaseModelPolicy

_SLOW = "slow_but_exact with pretraining_tp above 1 multiplies by slices of the whole weights of the row linears"


def _multiplies_by_slices(module: nn.Module) -> bool:
    """Tell whether attention and MLP go round their last linears."""
    return bool(module.slow_but_exact) and getattr(module, "pretraining_tp", 1) > 1


class BloomPolicy(BaseModelPolicy):
    """The decoder, with a head or without. ALiBi is made once for all heads; each rank takes that of its own."""

    checks = (Heads("num_attention_heads"),)
    stages = Stages(first=("word_embeddings", "word_embeddings_layernorm"), blocks="h", last="ln_f")

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the decoder and of its head."""
        slices = refuse(_multiplies_by_slices, _SLOW, todo="set slow_but_exact to False in the configuration")
        return {
            "BloomModel": [
                vocab("word_embeddings"),
                norm("word_embeddings_layernorm", "ln_f"),
                sequence(scatter="h[0]", gather="ln_f"),
                outputs(attentions="heads", hidden_states="sequence"),
            ],
            "BloomBlock": [
                norm("input_layernorm", "post_attention_layernorm"),
                slice_arg("self_attention", "alibi", 0),
                region(
                    enter="self_attention",
                    col=segments("self_attention.query_key_value", 3, by="head"),
                    row="self_attention.dense",
                    unit="head",
                ),
                region(enter="mlp", col="mlp.dense_h_to_4h", row="mlp.dense_4h_to_h"),
            ],
            "BloomAttention": [slices, attribute("num_heads", per_rank)],
            "BloomMLP": [slices],
            **self.heads(),
        }
