"""Shard unmodified models over tensor- and data-parallel ranks.

What to do to a model family comes from *packs*, separately installed packages that are found through entry points.
Names other than those of errors are loaded on first use: `import shardcore` and `import shardcore.hooks` load no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardcore._lazy import on_first_use
from shardcore.errors import (
    AgreementError,
    AlreadyShardedError,
    AmbiguousPolicyError,
    BrokenPackWarning,
    CheckpointError,
    ConfigError,
    MissingRanksError,
    NoPolicyError,
    NotSupportedError,
    PackError,
    PartlyShardedError,
    PlanError,
    RegistryError,
    ShardcoreError,
    ShardcoreWarning,
    StaleOptimizerWarning,
    UntestedVersionWarning,
    VocabParallelLogitsError,
    WrapError,
)

if TYPE_CHECKING:
    from shardcore.api import shard
    from shardcore.apply.launch import launch_from_torch
    from shardcore.apply.sharder import ModelSharder
    from shardcore.checkpoint import Loaded, latest, load_checkpoint, save_checkpoint, wait_for_checkpoint
    from shardcore.compile import compile_plan
    from shardcore.config import GradientCheckpointConfig, ShardConfig
    from shardcore.hooks import ParallelModuleSpec, PolicySpec, hookimpl
    from shardcore.initialization import initialize, on_meta
    from shardcore.mesh.context import ShardContext
    from shardcore.nn import ParallelModule, reduce_partial_gradients
    from shardcore.pipeline.norms import grad_norm
    from shardcore.plan import ShardPlan, Stages
    from shardcore.plugins.registry import Pack, Registry
    from shardcore.policy import Heads, Policy
    from shardcore.pretrained import from_pretrained
    from shardcore.random import get_rng_state, manual_seed, set_rng_state
    from shardcore.weights.gathering import full_tensors

__version__ = "0.1.0"

__all__ = [
    "AgreementError",
    "AlreadyShardedError",
    "AmbiguousPolicyError",
    "BrokenPackWarning",
    "CheckpointError",
    "ConfigError",
    "GradientCheckpointConfig",
    "Heads",
    "Loaded",
    "MissingRanksError",
    "ModelSharder",
    "NoPolicyError",
    "NotSupportedError",
    "Pack",
    "PackError",
    "ParallelModule",
    "ParallelModuleSpec",
    "PartlyShardedError",
    "PlanError",
    "Policy",
    "PolicySpec",
    "Registry",
    "RegistryError",
    "ShardConfig",
    "ShardContext",
    "ShardPlan",
    "ShardcoreError",
    "ShardcoreWarning",
    "Stages",
    "StaleOptimizerWarning",
    "UntestedVersionWarning",
    "VocabParallelLogitsError",
    "WrapError",
    "compile_plan",
    "from_pretrained",
    "full_tensors",
    "get_rng_state",
    "grad_norm",
    "hookimpl",
    "initialize",
    "latest",
    "launch_from_torch",
    "load_checkpoint",
    "manual_seed",
    "on_meta",
    "reduce_partial_gradients",
    "save_checkpoint",
    "set_rng_state",
    "shard",
    "wait_for_checkpoint",
]

#: Module -> the public names that it defines, loaded on first use.
_HOMES = {
    "shardcore.api": ("shard",),
    "shardcore.apply.launch": ("launch_from_torch",),
    "shardcore.apply.sharder": ("ModelSharder",),
    "shardcore.checkpoint": ("Loaded", "latest", "load_checkpoint", "save_checkpoint", "wait_for_checkpoint"),
    "shardcore.compile": ("compile_plan",),
    "shardcore.config": ("GradientCheckpointConfig", "ShardConfig"),
    "shardcore.hooks": ("ParallelModuleSpec", "PolicySpec", "hookimpl"),
    "shardcore.initialization": ("initialize", "on_meta"),
    "shardcore.mesh.context": ("ShardContext",),
    "shardcore.nn": ("ParallelModule", "reduce_partial_gradients"),
    "shardcore.pipeline.norms": ("grad_norm",),
    "shardcore.plan": ("ShardPlan", "Stages"),
    "shardcore.plugins.registry": ("Pack", "Registry"),
    "shardcore.policy": ("Heads", "Policy"),
    "shardcore.pretrained": ("from_pretrained",),
    "shardcore.random": ("get_rng_state", "manual_seed", "set_rng_state"),
    "shardcore.weights.gathering": ("full_tensors",),
}

if not TYPE_CHECKING:
    __getattr__ = on_first_use(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
