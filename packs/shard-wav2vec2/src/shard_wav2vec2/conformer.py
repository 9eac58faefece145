"""How encoders of speech are sharded that are Conformers: two MLPs around attention and convolutions in each block."""

from __future__ import annotations

from typing import Any

from torch import nn
from typing_extensions import override

from shard_wav2vec2.layerdrop import layer_drop_of_config
from shard_wav2vec2.policy import Wav2Vec2Policy
from shardcore.policy import Rule, Stages
from shardcore.styles import attribute, by_heads, local_heads, norm, outputs, refuse, region, replicate

#: The linears of queries, keys and values of a block.
QKV = ("self_attn.linear_q", "self_attn.linear_k", "self_attn.linear_v")


def turns_by_number(block: nn.Module) -> bool:
    """Tell whether a block turns all heads by the number with which it views a rank's: before transformers 5.17."""
    attention: Any = block.self_attn
    return attention.position_embeddings_type == "rotary" and not hasattr(attention, "scaling")


def mlp(name: str) -> Rule:
    """Return the rule of one MLP."""
    return region(enter=name, col=f"{name}.intermediate_dense", row=f"{name}.output_dense", optional=True)


class Wav2Vec2ConformerPolicy(Wav2Vec2Policy):
    """Wav2Vec2-Conformer: its convolutions, which mix tokens and normalize over channels, are whole on every rank.

    So there is no sequence parallelism. In training they normalize over all rows too, of which micro-batches have some:
    the stages name no blocks, so that there are no pipelines.
    """

    stages = Stages(first=(*Wav2Vec2Policy.front, "encoder", "adapter"), optional=("masked_spec_embed", "adapter"))

    @override
    def encoder(self) -> list[Rule]:
        return [replicate("pos_conv_embed"), norm("layer_norm"), layer_drop_of_config("layerdrop")]

    @override
    def captured(self) -> Rule:
        return outputs(attentions="heads")

    @override
    def attention(self) -> list[Rule]:
        kind = self.model.config.position_embeddings_type
        positions, table = ("self_attn.linear_pos",), ("self_attn.distance_embedding",)
        return [
            refuse(
                turns_by_number, "rotary positions need transformers 5.17", todo="use a newer one, or other positions"
            ),
            region(
                enter="self_attn",
                col=(*QKV, *(positions if kind == "relative" else ())),
                row="self_attn.linear_out",
                unit="head",
                partial=table if kind == "relative_key" else (),
            ),
            by_heads("self_attn.pos_bias_u", "self_attn.pos_bias_v", optional=True),
            # Rotary ones turn all heads, in front of the linears, and read the number of all.
            *([] if kind == "rotary" else [attribute("self_attn.num_heads", local_heads)]),
        ]

    @override
    def block(self) -> list[Rule]:
        return [
            norm("ffn1_layer_norm", "self_attn_layer_norm", "ffn2_layer_norm", "final_layer_norm"),
            mlp("ffn1"),
            mlp("ffn2"),
            replicate("conv_module"),
        ]
