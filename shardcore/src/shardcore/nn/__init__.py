"""Parallel modules: what stands in for native modules in a sharded model. May import `shardcore.comm` and below."""

from __future__ import annotations

from shardcore.comm.strided import fsdp_placement
from shardcore.nn.base import ParallelModule, SwappedModule
from shardcore.nn.blocks.compiled import Compiled
from shardcore.nn.blocks.norm import FusedRMSNorm
from shardcore.nn.blocks.recompute import Recomputed
from shardcore.nn.calls import CalledByMethods
from shardcore.nn.layout import Layout, Segments, Split, Whole
from shardcore.nn.linear.embedding import VocabEmbedding
from shardcore.nn.linear.fused import FusedColumnLinear
from shardcore.nn.linear.parallel import ColumnLinear, RowLinear
from shardcore.nn.loss.after_forward import TakesLoss
from shardcore.nn.loss.head import VocabHead
from shardcore.nn.loss.logits import SplitLogits, SplitsLogits, UncomputedLogits
from shardcore.nn.outputs import GathersOutputs
from shardcore.nn.partial import reduce_partial_gradients
from shardcore.nn.randomness.guard import StreamGuarded
from shardcore.nn.randomness.shared import SharedNumpy, SharedRandom
from shardcore.nn.region.region import Region
from shardcore.nn.region.sole import SoleRegion
from shardcore.nn.replicated import Replicated
from shardcore.nn.root import ShardedModel
from shardcore.nn.sequence.tokens import TokenBlock, TokenEnd, TokenSplit, TokenStack

__all__ = [
    "CalledByMethods",
    "ColumnLinear",
    "Compiled",
    "FusedColumnLinear",
    "FusedRMSNorm",
    "GathersOutputs",
    "Layout",
    "ParallelModule",
    "Recomputed",
    "Region",
    "Replicated",
    "RowLinear",
    "Segments",
    "ShardedModel",
    "SharedNumpy",
    "SharedRandom",
    "SoleRegion",
    "Split",
    "SplitLogits",
    "SplitsLogits",
    "StreamGuarded",
    "SwappedModule",
    "TakesLoss",
    "TokenBlock",
    "TokenEnd",
    "TokenSplit",
    "TokenStack",
    "UncomputedLogits",
    "VocabEmbedding",
    "VocabHead",
    "Whole",
    "fsdp_placement",
    "reduce_partial_gradients",
]
