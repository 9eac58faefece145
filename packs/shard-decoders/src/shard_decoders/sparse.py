"""How MiniMax M3 is sharded: in some of its blocks what each KV head sees is chosen by a small attention beside it."""

from __future__ import annotations

from typing import Any, ClassVar

from shard_llama.policy import LlamaPolicy
from shardcore.policy import ModulePolicy, Rule
from shardcore.styles import (
    attribute,
    enter_arg,
    experts,
    local_groups,
    local_heads,
    local_kv_heads,
    norm,
    outputs,
    partial,
    refuse,
    region,
    replicate,
    segments,
    vocab,
)


class MiniMaxM3Policy(LlamaPolicy):
    """MiniMax M3 for text: gates and features of each MLP are made by one linear.

    So is the expert that every token visits, which is a region of its own beside the others. Those are given tokens as
    rows, which are not split.
    """

    rms: ClassVar[str | None] = None  # the norms multiply by 1 + weight

    def module_policy(self) -> ModulePolicy:
        """Return the rules of a decoder like Llama, and of the attention of each block."""
        return {**super().module_policy(), **{block: self.own(block) for block in self.base.layers}}

    def decoder(self) -> list[Rule]:
        """Return the rules of what is around the blocks."""
        return [vocab("embed_tokens"), norm(self.final), outputs(attentions="heads")]

    def attention(self) -> list[Rule]:
        """Return no rules: attention differs from block to block."""
        return []

    def feed_forward(self) -> list[Rule]:
        """Return the rules of what follows the attention in a block."""
        return [
            *(
                region(enter=mlp, col=segments(f"{mlp}.gate_up_proj", 2), row=f"{mlp}.down_proj", optional=True)
                for mlp in ("mlp", "mlp.shared_experts")
            ),
            replicate("mlp.gate", optional=True),
            enter_arg("mlp.experts", "top_k_weights", optional=True),
            experts("mlp.experts", weights="", router=None, optional=True),
        ]

    def own(self, block: Any) -> list[Rule]:
        """Return the rules of the attention of one block, where a rank chooses for the KV heads that it has."""
        beside = "self_attn.indexer"
        chosen = block.self_attn.indexer is not None
        keys = ("self_attn.k_proj", "self_attn.v_proj", *([f"{beside}.q_proj"] if chosen else []))
        norms = ("self_attn.q_norm", "self_attn.k_norm")
        choosing = [
            refuse(_shares, "index_n_heads is another number than that of KV heads", todo="give each KV head one"),
            partial(*(f"{beside}.{name}" for name in ("k_proj", "q_norm", "k_norm"))),
            attribute(f"{beside}.num_heads", local_kv_heads),
            attribute(f"{beside}.config.num_attention_heads", local_heads),
        ]
        return [
            region(
                enter="self_attn", col="self_attn.q_proj", kv=keys, row="self_attn.o_proj", unit="head", partial=norms
            ),
            attribute("self_attn.num_key_value_groups", local_groups),
            *(choosing if chosen else []),
        ]


def _shares(block: Any) -> bool:
    """Tell whether several KV heads see what one head has chosen."""
    config = block.self_attn.config
    return bool(config.index_n_heads != config.num_key_value_heads)
