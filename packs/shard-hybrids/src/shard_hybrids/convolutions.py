"""How LFM2 is sharded: short convolutions in most of its blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from shard_hybrids.policy import HybridPolicy
from shard_llama.mixtures import MixturePolicy
from shardcore.policy import Rule
from shardcore.styles import by_heads, region, segments

_TABLES = ("rotary_emb", "pos_emb")


class Lfm2Policy(HybridPolicy):
    """LFM2."""

    norms: ClassVar[tuple[str, ...]] = ("operator_norm", "ffn_norm")
    final: ClassVar[str] = "embedding_norm"
    head_norms = ("q_layernorm", "k_layernorm")
    output: ClassVar[str] = "out_proj"
    mlp: ClassVar[str] = "feed_forward"
    columns: ClassVar[tuple[str, ...]] = ("w1", "w3")
    row: ClassVar[str] = "w2"
    mixer: ClassVar[str] = "Lfm2ShortConv"
    stages = replace(HybridPolicy.stages, last="embedding_norm", everywhere=_TABLES, optional=_TABLES)

    def mixing(self) -> list[Rule]:
        """Return the rules of a short convolution of the second of three projections, each as wide as the states."""
        return [region(enter="", col=segments("in_proj", 3), row="out_proj"), by_heads("conv")]


class Lfm2MoePolicy(Lfm2Policy, MixturePolicy):
    """LFM2 with experts."""

    mixture: ClassVar[str] = "feed_forward"
    mixer: ClassVar[str] = "Lfm2MoeShortConv"
