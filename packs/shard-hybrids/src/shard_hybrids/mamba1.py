"""How Jamba is sharded: mixers of Mamba in most of its blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from shard_hybrids.policy import HybridPolicy
from shard_llama.mixtures import MixturePolicy
from shardcore.policy import Rule
from shardcore.styles import by_heads, region, segments


class JambaPolicy(HybridPolicy, MixturePolicy):
    """Jamba, with an MLP or experts in a block."""

    norms: ClassVar[tuple[str, ...]] = ("input_layernorm", "pre_ff_layernorm")
    final: ClassVar[str] = "final_layernorm"
    mlp: ClassVar[str] = "feed_forward"
    mixture: ClassVar[str] = "feed_forward"
    router: ClassVar[str] = "router"
    mixer: ClassVar[str] = "JambaMambaMixer"
    stages = replace(HybridPolicy.stages, last="final_layernorm", everywhere=())

    def mixing(self) -> list[Rule]:
        """Return the rules of a mixer, whose channels have states of their own.

        What goes in and out of the states, and the sizes of steps, are made of all channels and read by each.
        """
        norms = ("dt_layernorm", "b_layernorm", "c_layernorm")
        return [
            region(enter="", col=segments("in_proj", 2), row=("x_proj", "out_proj"), partial=norms),
            by_heads("conv1d", "dt_proj", "A_log", "D"),
        ]
