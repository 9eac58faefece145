"""Parallel modules: what stands in for native modules in a sharded model. May import `shardcore.comm` and below."""

from __future__ import annotations

from shardcore.comm.strided import fsdp_placement
from shardcore.nn.base import ParallelModule, SwappedModule
from shardcore.nn.calls import CalledByMethods
from shardcore.nn.compiled import Compiled
from shardcore.nn.embedding import VocabEmbedding
from shardcore.nn.fused import FusedColumnLinear
from shardcore.nn.guard import StreamGuarded
from shardcore.nn.head import VocabHead
from shardcore.nn.layout import Layout, Segments, Split, Whole
from shardcore.nn.linear import ColumnLinear, RowLinear
from shardcore.nn.logits import SplitLogits, SplitsLogits, UncomputedLogits
from shardcore.nn.loss import TakesLoss
from shardcore.nn.norm import FusedRMSNorm
from shardcore.nn.outputs import GathersOutputs
from shardcore.nn.partial import reduce_partial_gradients
from shardcore.nn.recompute import Recomputed
from shardcore.nn.region import Region
from shardcore.nn.replicated import Replicated
from shardcore.nn.root import ShardedModel
from shardcore.nn.shared_random import SharedNumpy, SharedRandom
from shardcore.nn.sole_region import SoleRegion
from shardcore.nn.tokens import TokenBlock, TokenEnd, TokenSplit, TokenStack

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
