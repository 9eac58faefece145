"""Parallel modules: what stands in for native modules in a sharded model. May import `shardcore.comm` and below."""

from __future__ import annotations

from shardcore.comm.strided import fsdp_placement
from shardcore.nn.base import ParallelModule, SwappedModule
from shardcore.nn.blocks.compiled import CompiledBlock
from shardcore.nn.blocks.norm import FusedRMSNorm
from shardcore.nn.blocks.recompute import RecomputedBlock
from shardcore.nn.calls import MethodsAsCalls
from shardcore.nn.layout import Layout, ReplicatedLayout, SegmentedLayout, ShardedLayout
from shardcore.nn.linear.embedding import VocabEmbedding
from shardcore.nn.linear.fused import FusedColumnLinear
from shardcore.nn.linear.parallel import ColumnLinear, RowLinear
from shardcore.nn.loss.after_forward import LossFromOutputs
from shardcore.nn.loss.head import VocabHead
from shardcore.nn.loss.logits import LazyLogits, VocabParallelLogits, VocabParallelLossModel
from shardcore.nn.outputs import OutputGatherer
from shardcore.nn.partial import reduce_partial_gradients
from shardcore.nn.randomness.guard import RngScope
from shardcore.nn.randomness.shared import SharedNumpy, SharedRandom
from shardcore.nn.region.region import Region
from shardcore.nn.region.sole import SoleRegion
from shardcore.nn.replicated import Replicated
from shardcore.nn.root import ShardedModel
from shardcore.nn.sequence.tokens import SequenceBlock, SequenceEnd, SequenceShard, SequenceStack

__all__ = [
    "ColumnLinear",
    "CompiledBlock",
    "FusedColumnLinear",
    "FusedRMSNorm",
    "Layout",
    "LazyLogits",
    "LossFromOutputs",
    "MethodsAsCalls",
    "OutputGatherer",
    "ParallelModule",
    "RecomputedBlock",
    "Region",
    "Replicated",
    "ReplicatedLayout",
    "RngScope",
    "RowLinear",
    "SegmentedLayout",
    "SequenceBlock",
    "SequenceEnd",
    "SequenceShard",
    "SequenceStack",
    "ShardedLayout",
    "ShardedModel",
    "SharedNumpy",
    "SharedRandom",
    "SoleRegion",
    "SwappedModule",
    "VocabEmbedding",
    "VocabHead",
    "VocabParallelLogits",
    "VocabParallelLossModel",
    "fsdp_placement",
    "reduce_partial_gradients",
]
