"""How the first Qwen is sharded, whose classes are remote code."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from shardcore.errors import NotSupportedError
from shardcore.nn import ParallelMixin
from shardcore.policy import Heads, ModulePolicy, Stages, Word
from shardcore.styles import attribute, local_heads, norm, outputs, per_rank, region, segments, sequence, vocab
from shardcore_transformers import BaseModelPolicy, divides, sdpa


class QWenPolicy(BaseModelPolicy):
    """The first Qwen, with a head or without."""

    checks = (Heads("num_attention_heads"),)
    stages = Stages(first=("wte", "drop"), blocks="h", last="ln_f", everywhere="rotary_emb")

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the decoder, its blocks and its head."""
        return {
            self.base: [
                vocab("wte"),
                norm("ln_f", rms="eps"),
                sequence(scatter="h[0]", gather="ln_f", attention="attn"),
                outputs(hidden_states="sequence"),
            ],
            type(self.base.h[0]): [
                norm("ln_1", "ln_2", rms="eps"),
                region(enter="attn", col=segments("attn.c_attn", 3), row="attn.c_proj", unit="head"),
                attribute("attn.num_heads", local_heads),
                attribute("attn.split_size", per_rank),
                Word(text="attends('attn')", planned=lambda scope: scope.swap("attn", Attends)),
                region(enter="mlp", col=("mlp.w1", "mlp.w2"), row="mlp.c_proj"),
            ],
            **self.heads(),
        }


class Attends(ParallelMixin):
    """The attention, which asks for the tokens of all ranks of ``cp`` where they are divided."""

    keeps_name: ClassVar[bool] = True
    plan_needs_tp: ClassVar[bool] = False  # ranks of ``cp`` divide tokens too
    plan_attends: ClassVar[bool] = True

    split_size: int
    head_dim: int
    seq_length: int

    def forward(
        self,
        hidden_states: Tensor,
        rotary_pos_emb_list: Any = None,
        layer_past: Any = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return what the native attention does; of this rank's tokens (B, L, H) where they are divided, no cache.

        Raises:
            NotSupportedError: rows whose positions are slowed differently, queries that grow with their position, or
                padding before words, which the native attention lets see all tokens alike.
        """
        tokens = divides(self)
        if tokens is None:
            return super().forward(hidden_states, rotary_pos_emb_list, layer_past, attention_mask, **kwargs)
        grows = not self.training and self.use_logn_attn and tokens > self.seq_length
        if len(rotary_pos_emb_list) > 1 or grows:
            raise NotSupportedError(
                f"{type(self).__name__} in evaluation on {tokens} tokens, more than its seq_length {self.seq_length}, "
                "under context parallelism: pass no mask and set use_logn_attn=False, or shard without "
                "context_parallel_size"
            )
        seen = None if attention_mask is None else attention_mask == 0  # (B, 1, 1, S)
        if seen is not None and not seen.is_meta and not bool(seen[..., 0].all()):
            raise NotSupportedError(
                f"{type(self).__name__} under context parallelism got rows that begin with padding: pad at their end "
                "(padding_side='right'), or shard without context_parallel_size"
            )
        parts = self.c_attn(hidden_states).split(self.split_size, -1)  # type: ignore[operator]  # a linear
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        q, k = (_rotated(x, *rotary_pos_emb_list[0]) for x in (q, k))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = sdpa(self, q, k, v, seen, is_causal=True)
        return self.c_proj(out.flatten(2)), None  # type: ignore[operator]  # a linear


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first dims of heads (B, L, heads, D), each in the first half of them with one in the second."""
    turned, rest = x[..., : cos.size(-1)].to(cos.dtype), x[..., cos.size(-1) :]
    first, second = turned.chunk(2, -1)
    return torch.cat([(turned * cos + torch.cat([-second, first], -1) * sin).type_as(x), rest], -1)
