"""How OPT is sharded: what every class of its modules needs."""

from __future__ import annotations

from shardcore.policy import Heads, ModulePolicy, Stages
from shardcore.styles import (
    attribute,
    layer_drop,
    norm,
    outputs,
    per_rank,
    region,
    replicate,
    vocab,
)
from shardcore_transformers import BaseModelPolicy


class OPTPolicy(BaseModelPolicy):
    """The decoder, with a head or without.

    Its blocks flatten rows and tokens into one dim, so tokens are not split between them (sequence parallelism).
    """

    checks = (Heads("num_attention_heads"),)
    stages = Stages(
        first=("decoder.embed_tokens", "decoder.embed_positions", "decoder.project_in"),
        blocks="decoder.layers",
        last=("decoder.final_layer_norm", "decoder.project_out"),
    )

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the decoder and of its head."""
        return {
            "OPTDecoder": [
                vocab("embed_tokens"),
                replicate("embed_positions"),
                replicate("project_in", "project_out", optional=True),
                norm("final_layer_norm", optional=True),
                layer_drop("layerdrop"),
                outputs(attentions="heads"),
            ],
            "OPTDecoderLayer": [
                norm("self_attn_layer_norm", "final_layer_norm"),
                region(
                    enter="self_attn",
                    col=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                    row="self_attn.out_proj",
                    unit="head",
                ),
                attribute("self_attn.num_heads", per_rank),
                region(col="fc1", row="fc2"),
            ],
            **self.heads(),
        }
