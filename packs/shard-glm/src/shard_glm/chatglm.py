"""How ChatGLM2 is sharded, whose classes are remote code with a layout of their own: activations are (S, B, H).

Tokens are split in dim 1, so its blocks run on (B, S, H) here. Its attention puts tokens first for itself, computes
as it is written, and returns tokens second again; caches stay (S, B, groups, D).
"""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast

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
from shardcore_transformers import BaseModelPolicy, sdpa

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


class _Layout(ParallelMixin):
    keeps_name: ClassVar[bool] = True
    plan_needs_tp: ClassVar[bool] = False  # ranks of ``cp`` divide tokens too


class RowsFirstInside(_Layout):
    """The stack: given (S, B, H) and rotations (S, B or 1, D / 4, 2), its blocks run on (B, S, ...)."""

    # Around whatever gathers what the blocks return.
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the native stack does: states (S, B, H), caches, captured states (S, B, H), and None."""
        out = super().__call__(*args, **kwargs)
        return _swapped(out.last_hidden_state), out.past_key_values, _swapped(out.hidden_states), out.attentions

    def forward(self, hidden_states: Tensor, attention_mask: Any, rotary_pos_emb: Tensor, **kwargs: Any) -> Any:
        """Return the outputs of the native stack for (B, S, H), by name."""
        out = super().forward(_swapped(hidden_states), attention_mask, _swapped(rotary_pos_emb), **kwargs)
        names = ("last_hidden_state", "past_key_values", "hidden_states", "attentions")
        return BaseModelOutputWithPast(**dict(zip(names, out, strict=True)))


class TokensFirstInside(_Layout):
    """The attention of a block: given (B, S, H), it computes on (S, B, ...)."""

    def forward(
        self, hidden_states: Tensor, attention_mask: Any, rotary_pos_emb: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Return what the native attention does, (B, S, H), and its cache."""
        # Its rotation is a scripted function, whose fuser knows no meta device, on which pipelines look for shapes.
        unfused: Any = torch.jit.optimized_execution  # type: ignore[attr-defined]  # it is documented, not in __all__
        with unfused(False) if hidden_states.is_meta else contextlib.nullcontext():
            return super().forward(_swapped(hidden_states), attention_mask, _swapped(rotary_pos_emb), *args, **kwargs)


class Attends(_Layout):
    """Scaled dot products of (S, B, heads, D), to (B, S, heads * D), with the tokens of all ranks of ``cp``."""

    plan_attends: ClassVar[bool] = True

    def forward(self, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor, attention_mask: Any) -> Tensor:
        """Return what the native attention does, with tokens second; True in a mask hides a key."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query_layer, key_layer, value_layer))
        seen = None if attention_mask is None else ~attention_mask
        return sdpa(self, q, k, v, seen, is_causal=q.size(2) == k.size(2)).flatten(2)


def _swapped(value: Any) -> Any:
    """Swap tokens and rows of a tensor, or of each in a tuple."""
    if isinstance(value, tuple):
        return tuple(map(_swapped, value))
    return None if value is None else value.transpose(0, 1)
