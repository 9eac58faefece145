"""The names that people know from Shardformer (ColossalAI), as aliases of what shardcore calls them.

``docs/compat.md`` lists every name with what became of it. One that comes with a later release raises
`NotSupportedError` when it is imported from here.
"""

from __future__ import annotations

from typing import NoReturn

import shardcore
from shardcore.checkpointing import GradientCheckpointConfig
from shardcore.config import ShardConfig
from shardcore.errors import NotSupportedError
from shardcore.former import ShardFormer
from shardcore.launch import launch_from_torch
from shardcore.nn import ColumnLinear, FusedColumnLinear, ParallelModule, RowLinear, VocabEmbedding
from shardcore.policy import ModulePolicyDescription, Policy, SubModuleReplacementDescription
from shardcore.sharder import ModelSharder

__all__ = [
    "FusedLinear1D_Col",
    "GradientCheckpointConfig",
    "Linear1D_Col",
    "Linear1D_Row",
    "ModelSharder",
    "ModulePolicyDescription",
    "ParallelModule",
    "Policy",
    "ShardConfig",
    "ShardFormer",
    "SubModuleReplacementDescription",
    "VocabParallelEmbedding1D",
    "VocabParallelLMHead1D",
    "launch_from_torch",
]

Linear1D_Col = ColumnLinear
Linear1D_Row = RowLinear
FusedLinear1D_Col = FusedColumnLinear
VocabParallelEmbedding1D = VocabEmbedding
#: A column linear over the vocabulary: ``gather_output=True`` makes the logits whole.
VocabParallelLMHead1D = ColumnLinear

# Name -> the release that is to bring it, and what does its work until then.
_LATER = {
    "Booster": ("0.4", "shardcore.shard and a plain training loop"),
    "Embedding1D": ("0.5", "VocabParallelEmbedding1D, which splits the vocabulary instead of the features"),
    "FusedLinear1D_Row": ("0.3", "Linear1D_Row after FusedLinear1D_Col"),
    "GPT2FusedLinearConv1D_Col": ("0.3", "a ParallelModule of your own"),
    "GPT2FusedLinearConv1D_Row": ("0.3", "a ParallelModule of your own"),
    "HybridParallelPlugin": ("0.4", "shardcore.shard(model, tp=..., dp=...)"),
    "PipelineStageManager": ("0.4", "tensor and data parallelism"),
    "PipelineGradientCheckpointConfig": ("0.4", "GradientCheckpointConfig"),
}


def __getattr__(name: str) -> NoReturn:
    if name in _LATER:
        release, instead = _LATER[name]
        raise NotSupportedError(
            f"{name} is not in shardcore {shardcore.__version__}; it is planned for release {release}. Until then: "
            f"{instead}."
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
