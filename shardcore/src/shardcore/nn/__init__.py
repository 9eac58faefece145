"""Parallel modules: what stands in for native modules in a sharded model. May import `shardcore.comm` and below.

What is exported here is for authors of packs, and kept as the page on stability says; the rest is private to the core.
"""

from __future__ import annotations

from shardcore.comm.strided import fsdp_placement
from shardcore.nn.base import ParallelMixin, ParallelModule, ReplacedMethods
from shardcore.nn.blocks import FusedRMSNorm
from shardcore.nn.layout import (
    ExchangedLayout,
    GroupShardedLayout,
    Layout,
    ReplicatedLayout,
    SegmentedLayout,
    ShardedLayout,
)
from shardcore.nn.linear.embedding import VocabEmbedding
from shardcore.nn.linear.fused import FusedColumnLinear
from shardcore.nn.linear.parallel import ColumnLinear, RowLinear
from shardcore.nn.loss.head import VocabHead
from shardcore.nn.loss.logits import VocabParallelLogits
from shardcore.nn.mixin import mixins
from shardcore.nn.over_heads import NormOverHeads
from shardcore.nn.partial import reduce_partial_gradients
from shardcore.nn.randomness import SharedNumpy, SharedRandom
from shardcore.nn.replicated import HeadParameters, Replicated

__all__ = [
    "ColumnLinear",
    "ExchangedLayout",
    "FusedColumnLinear",
    "FusedRMSNorm",
    "GroupShardedLayout",
    "HeadParameters",
    "Layout",
    "NormOverHeads",
    "ParallelMixin",
    "ParallelModule",
    "ReplacedMethods",
    "Replicated",
    "ReplicatedLayout",
    "RowLinear",
    "SegmentedLayout",
    "ShardedLayout",
    "SharedNumpy",
    "SharedRandom",
    "VocabEmbedding",
    "VocabHead",
    "VocabParallelLogits",
    "fsdp_placement",
    "mixins",
    "reduce_partial_gradients",
]
