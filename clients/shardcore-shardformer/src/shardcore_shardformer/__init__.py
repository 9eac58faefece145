"""What people know from Shardformer (ColossalAI): its training engine, and its names for what shardcore has.

`Booster` and `HybridParallelPlugin` are a thin layer over `shardcore.shard`, FSDP2 and torch's optimizers.

``docs/compat.md`` lists every name with what became of it. One that is not there raises `NotSupportedError` when it is
imported from here.
"""

from __future__ import annotations

from typing import NoReturn

import shardcore
from shardcore.apply.launch import launch_from_torch
from shardcore.apply.sharder import ModelSharder
from shardcore.config import GradientCheckpointConfig
from shardcore.errors import NotSupportedError
from shardcore.nn import ColumnLinear, FusedColumnLinear, ParallelModule, RowLinear, VocabEmbedding
from shardcore.policy import Policy
from shardcore_shardformer.booster import Boosted, Booster
from shardcore_shardformer.config import ShardConfig
from shardcore_shardformer.descriptions import ModulePolicyDescription, SubModuleReplacementDescription
from shardcore_shardformer.dropout import DropoutForParallelInput, DropoutForReplicatedInput
from shardcore_shardformer.former import ShardFormer
from shardcore_shardformer.groups import ProcessGroupManager
from shardcore_shardformer.losses import cross_entropy_1d, dist_log_prob_1d
from shardcore_shardformer.plugin import HybridParallelPlugin
from shardcore_shardformer.stage_manager import PipelineStageManager

__all__ = [
    "Boosted",
    "Booster",
    "DropoutForParallelInput",
    "DropoutForReplicatedInput",
    "FusedLinear1D_Col",
    "GradientCheckpointConfig",
    "HybridParallelPlugin",
    "Linear1D_Col",
    "Linear1D_Row",
    "ModelSharder",
    "ModulePolicyDescription",
    "ParallelModule",
    "PipelineGradientCheckpointConfig",
    "PipelineStageManager",
    "Policy",
    "ProcessGroupManager",
    "Shard",
    "ShardConfig",
    "ShardFormer",
    "SubModuleReplacementDescription",
    "VocabParallelEmbedding1D",
    "VocabParallelLMHead1D",
    "cross_entropy_1d",
    "dist_log_prob_1d",
    "launch_from_torch",
]

#: One class says how many blocks are recomputed, of all or of each stage.
PipelineGradientCheckpointConfig = GradientCheckpointConfig
Linear1D_Col = ColumnLinear
Linear1D_Row = RowLinear
FusedLinear1D_Col = FusedColumnLinear
VocabParallelEmbedding1D = VocabEmbedding
#: A column linear over the vocabulary: ``gather_output=True`` makes the logits whole.
VocabParallelLMHead1D = ColumnLinear
#: The quick start imports this name and goes on to use the other.
Shard = ShardFormer

# Name -> what does its work.
_OTHERWISE = {
    "ColoAttention": "the attention of the model's library: attn_implementation='sdpa'",
    "Embedding1D": "VocabParallelEmbedding1D splits the vocabulary instead of the features",
    "FusedLinear": "torch.nn.Linear, which a policy replicates",
    "FusedLinear1D_Row": "Linear1D_Row after FusedLinear1D_Col",
    "GPT2FusedLinearConv": "a ParallelModule of your own",
    "GPT2FusedLinearConv1D_Col": "FusedLinear1D_Col, which takes transformers' Conv1D",
    "GPT2FusedLinearConv1D_Row": "Linear1D_Row, which takes transformers' Conv1D",
    "PaddingEmbedding": "VocabParallelEmbedding1D: a vocabulary of any size is split unevenly",
    "PaddingLMHead": "VocabParallelLMHead1D: a vocabulary of any size is split unevenly",
    "RingAttention": "shardcore.shard(model, cp=2, context_parallel_mode='ring_attn')",
    "LazyInitContext": "shardcore.on_meta(cls, ...) builds a model without memory for its parameters",
    "LinearWithGradAccum": "torch.nn.Linear, whose backward torch's schedules split where they split backwards ('zbv')",
    "FusedRMSNorm": "enable_fused_normalization=True fuses the norms of a model",
    "dist_cross_entropy": "under parallel_output=True a model's own loss takes split logits; else cross_entropy_1d",
    "dist_log_prob": "dist_log_prob_1d, of logits and labels that are shifted against each other",
    "FusedLayerNorm": "torch.nn.LayerNorm is fused already; enable_fused_normalization=True fuses the norms of a model",
}


def __getattr__(name: str) -> NoReturn:
    if name in _OTHERWISE:
        raise NotSupportedError(f"{name} is not in shardcore {shardcore.__version__}: {_OTHERWISE[name]}.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
