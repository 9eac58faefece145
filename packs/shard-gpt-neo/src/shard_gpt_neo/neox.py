"""How GPT-NeoX is sharded: what every class of its modules needs.

One linear computes query, key and value of head after head, so any number of ranks share the heads: the attention reads
their number off what it is given.
"""

from __future__ import annotations

from shardcore.policy import Heads, ModulePolicy, Stages
from shardcore.styles import norm, outputs, region, segments, sequence, vocab
from shardcore_transformers import BaseModelPolicy


class GPTNeoXPolicy(BaseModelPolicy):
    """The decoder, with a head or without: attention and MLP read the same tokens, or one after the other."""

    checks = (Heads("num_attention_heads", uneven=True),)
    words = ("lm_head", "embed_out")  # the name of older releases of transformers
    stages = Stages(
        first=("embed_in", "emb_dropout"), blocks="layers", last="final_layer_norm", everywhere="rotary_emb"
    )

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the decoder and of its head."""
        return {
            "GPTNeoXModel": [
                vocab("embed_in"),
                norm("final_layer_norm"),
                sequence(scatter="layers[0]", gather="final_layer_norm", attention="attention"),
                outputs(attentions="heads", hidden_states="sequence"),
            ],
            "GPTNeoXLayer": [
                norm("input_layernorm", "post_attention_layernorm"),
                region(
                    enter="attention",
                    col=segments("attention.query_key_value", 3, by="head"),
                    row="attention.dense",
                    unit="head",
                ),
                region(enter="mlp", col="mlp.dense_h_to_4h", row="mlp.dense_4h_to_h"),
            ],
            **self.heads(),
        }
