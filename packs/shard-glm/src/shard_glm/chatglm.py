"""How ChatGLM2 is sharded, whose classes are remote code with a layout of their own: activations are (S, B, H).

Tokens are split in dim 1, so its blocks run on (B, S, H) here. Its attention puts tokens first for itself, computes
as it is written, and returns tokens second again; caches stay (S, B, groups, D).
"""

from __future__ import annotations

from typing import Any

from shard_glm.chatglm_layout import Attends, RowsFirstInside, TokensFirstInside
from shardcore.nn import ParallelMixin
from shardcore.policy import HeadCounts, Heads, ModulePolicy, Rule, Stages, Word
from shardcore.styles import (
    attribute,
    col,
    head,
    local_heads,
    local_kv_heads,
    norm,
    outputs,
    refuse,
    region,
    segments,
    sequence,
    vocab,
)
from shardcore_transformers import BaseModelPolicy

_ROWS_FIRST = "its activations are (B, S, H), as those of GLM-4-9b, whose classes have the names of ChatGLM2"


class _Groups(Heads):
    """What the attention counts: groups of heads share keys and values, or each head has its own."""

    def counts(self, model: Any, ranks: int) -> HeadCounts | None:
        config = model.config
        heads = config.num_attention_heads
        groups = config.multi_query_group_num if config.multi_query_attention else heads
        return HeadCounts(query=heads, kv=groups, ranks=ranks)


class ChatGLMPolicy(BaseModelPolicy):
    """ChatGLM2 and what is built like it (ChatGLM3, CodeGeeX2), with a head or without."""

    checks = (_Groups("num_attention_heads", kv="multi_query_group_num"),)
    stages = Stages(
        first="embedding",
        blocks="encoder.layers",
        last=("encoder.final_layernorm", "output_layer"),
        everywhere="rotary_pos_emb",
    )

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the decoder, its stack and its blocks."""
        config, encoder = self.model.config, self.base.encoder
        rms = "eps" if config.rmsnorm else None
        qkv = "self_attention.query_key_value"
        shared = segments(qkv, ("query", "key", "value"))
        attention = "self_attention.core_attention"
        return {
            self.base: [
                refuse(_has_rows_first, _ROWS_FIRST, todo="load such a checkpoint as GlmForCausalLM"),
                vocab("embedding.word_embeddings"),
                # The decoder alone leaves it to its caller.
                head("output_layer") if self.inside else col("output_layer", gather_output=True),
            ],
            encoder: [
                norm("final_layernorm", rms=rms),
                sequence(scatter="layers[0]", gather="final_layernorm", attention=attention),
                outputs(hidden_states="sequence"),
                replaced("", RowsFirstInside),
            ],
            type(encoder.layers[0]): [
                norm("input_layernorm", "post_attention_layernorm", rms=rms),
                region(
                    enter="self_attention",
                    col=shared if config.multi_query_attention else segments(qkv, 3, by="head"),
                    row="self_attention.dense",
                    unit="head",
                ),
                attribute("self_attention.num_attention_heads_per_partition", local_heads),
                attribute("self_attention.num_multi_query_groups_per_partition", local_kv_heads, optional=True),
                replaced("self_attention", TokensFirstInside),
                replaced(attention, Attends),
                region(enter="mlp", col=segments("mlp.dense_h_to_4h", 2), row="mlp.dense_4h_to_h"),
            ],
        }


def replaced(name: str, target: type[ParallelMixin]) -> Rule:
    """Return the rule by which a module does what it does in another layout."""
    return Word(text=f"replaced({name!r}, {target.__name__})", planned=lambda scope: scope.swap(name, target))


def _has_rows_first(model: Any) -> bool:
    return "transpose" not in type(model.embedding).forward.__code__.co_names
