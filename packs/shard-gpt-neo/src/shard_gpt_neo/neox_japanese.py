"""How GPT-NeoX-Japanese is sharded: like GPT-NeoX, with a bias that the last block adds.

The attention of the last block holds that bias and returns it, so no region is entered where the attention is.
"""

from __future__ import annotations

from shard_gpt_neo.neox import GPTNeoXPolicy
from shardcore.policy import ModulePolicy, Stages
from shardcore.styles import attribute, local_heads, norm, outputs, region, replicate, segments, sequence, vocab


class GPTNeoXJapanesePolicy(GPTNeoXPolicy):
    """GPT-NeoX-Japanese, with a head or without; its attention counts heads."""

    stages = Stages(first="embed_in", blocks="layers", last="final_layer_norm", everywhere="rotary_emb")

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the decoder and of its head."""
        return {
            "GPTNeoXJapaneseModel": [
                vocab("embed_in"),
                norm("final_layer_norm"),
                sequence(scatter="layers[0]", gather="final_layer_norm"),
                outputs(attentions="heads", hidden_states="sequence"),
            ],
            "GPTNeoXJapaneseLayer": [
                norm("input_layernorm", "post_attention_layernorm"),
                region(
                    col=segments("attention.query_key_value", 3, by="head"),
                    row="attention.dense",
                    unit="head",
                ),
                replicate("attention.dense_bias", optional=True),
                attribute("attention.num_attention_heads", local_heads),
                region(enter="mlp", col="mlp.dense_h_to_4h", row="mlp.dense_4h_to_h"),
            ],
            **self.heads(),
        }
