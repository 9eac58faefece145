"""Shard unmodified models over tensor- and data-parallel ranks.

What to do to a model family comes from *packs*, separately installed packages that are found through entry points.
Every public name is loaded on first use, so that `import shardcore` and `import shardcore.hooks` load no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardcore.api import shard
    from shardcore.apply.launch import launch_from_torch
    from shardcore.apply.sharder import ModelSharder
    from shardcore.checkpoint import Loaded, latest, load_checkpoint, save_checkpoint, wait_for_checkpoint
    from shardcore.compile import compile_plan
    from shardcore.config import GradientCheckpointConfig, ShardConfig
    from shardcore.data import ShardedDataLoader
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
        ShardcoreDeprecationWarning,
        ShardcoreError,
        ShardcoreWarning,
        StaleOptimizerWarning,
        UntestedVersionWarning,
        VocabParallelLogitsError,
        WrapError,
    )
    from shardcore.hooks import ParallelModuleSpec, PolicySpec, hookimpl
    from shardcore.initialization import initialize, on_meta
    from shardcore.mesh import ShardContext
    from shardcore.nn import ParallelModule, reduce_partial_gradients
    from shardcore.pipeline.norms import grad_norm
    from shardcore.plan import ShardPlan, Stages
    from shardcore.plugins.registry import Pack, Registry
    from shardcore.policy import (
        Heads,
        Policy,
    )
    from shardcore.preemption import Preemption
    from shardcore.pretrained import from_pretrained
    from shardcore.random import get_rng_state, manual_seed, set_rng_state

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
    "Preemption",
    "Registry",
    "RegistryError",
    "ShardConfig",
    "ShardContext",
    "ShardPlan",
    "ShardcoreDeprecationWarning",
    "ShardcoreError",
    "ShardcoreWarning",
    "ShardedDataLoader",
    "Stages",
    "StaleOptimizerWarning",
    "UntestedVersionWarning",
    "VocabParallelLogitsError",
    "WrapError",
    "compile_plan",
    "from_pretrained",
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

# Public name -> the module that defines it.
_HOME = {
    "AgreementError": "shardcore.errors",
    "AlreadyShardedError": "shardcore.errors",
    "AmbiguousPolicyError": "shardcore.errors",
    "BrokenPackWarning": "shardcore.errors",
    "CheckpointError": "shardcore.errors",
    "ConfigError": "shardcore.errors",
    "GradientCheckpointConfig": "shardcore.config",
    "Heads": "shardcore.policy",
    "Loaded": "shardcore.checkpoint",
    "MissingRanksError": "shardcore.errors",
    "ModelSharder": "shardcore.apply.sharder",
    "NoPolicyError": "shardcore.errors",
    "NotSupportedError": "shardcore.errors",
    "Pack": "shardcore.plugins.registry",
    "PackError": "shardcore.errors",
    "ParallelModule": "shardcore.nn",
    "ParallelModuleSpec": "shardcore.hooks",
    "PartlyShardedError": "shardcore.errors",
    "PlanError": "shardcore.errors",
    "Policy": "shardcore.policy",
    "PolicySpec": "shardcore.hooks",
    "Preemption": "shardcore.preemption",
    "Registry": "shardcore.plugins.registry",
    "RegistryError": "shardcore.errors",
    "ShardConfig": "shardcore.config",
    "ShardContext": "shardcore.mesh",
    "ShardPlan": "shardcore.plan",
    "ShardcoreDeprecationWarning": "shardcore.errors",
    "ShardcoreError": "shardcore.errors",
    "ShardcoreWarning": "shardcore.errors",
    "VocabParallelLogitsError": "shardcore.errors",
    "ShardedDataLoader": "shardcore.data",
    "Stages": "shardcore.plan",
    "StaleOptimizerWarning": "shardcore.errors",
    "UntestedVersionWarning": "shardcore.errors",
    "WrapError": "shardcore.errors",
    "compile_plan": "shardcore.compile",
    "from_pretrained": "shardcore.pretrained",
    "get_rng_state": "shardcore.random",
    "grad_norm": "shardcore.pipeline.norms",
    "hookimpl": "shardcore.hooks",
    "initialize": "shardcore.initialization",
    "latest": "shardcore.checkpoint",
    "launch_from_torch": "shardcore.apply.launch",
    "load_checkpoint": "shardcore.checkpoint",
    "manual_seed": "shardcore.random",
    "on_meta": "shardcore.initialization",
    "reduce_partial_gradients": "shardcore.nn",
    "save_checkpoint": "shardcore.checkpoint",
    "set_rng_state": "shardcore.random",
    "shard": "shardcore.api",
    "wait_for_checkpoint": "shardcore.checkpoint",
}


# Hidden from type checkers, which would otherwise take every misspelled name for one that exists.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Load a public name on first use (PEP 562)."""
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
