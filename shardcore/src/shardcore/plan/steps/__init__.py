"""The steps of a plan: what is done to a model, as data that knows how it is done.

Each names a module by its full name and says what becomes of it. A new kind of step is a class here: nothing else lists
them.
"""

from __future__ import annotations

from shardcore.plan.steps.base import ApplyContext, Commit, Phase, PlanView, Step, above
from shardcore.plan.steps.experts import EnterExperts, SyncRouting
from shardcore.plan.steps.local import Compile, FreezeForInference, FuseNorm, Recompute
from shardcore.plan.steps.modules import ByRank, ScopeRandomness, SetAttribute, Swap
from shardcore.plan.steps.outputs import (
    CallByMethods,
    GatherOutputs,
    GatherStageAttentions,
    KeepLogitsSharded,
    RefuseCaptured,
    TakeLoss,
)
from shardcore.plan.steps.regions import EnterArgument, EnterRegion, SliceArgument
from shardcore.plan.steps.tokens import DivideLogits, DivideTokens, ShardSequence

__all__ = [
    "ApplyContext",
    "ByRank",
    "CallByMethods",
    "Commit",
    "Compile",
    "DivideLogits",
    "DivideTokens",
    "EnterArgument",
    "EnterExperts",
    "EnterRegion",
    "FreezeForInference",
    "FuseNorm",
    "GatherOutputs",
    "GatherStageAttentions",
    "KeepLogitsSharded",
    "Phase",
    "PlanView",
    "Recompute",
    "RefuseCaptured",
    "ScopeRandomness",
    "SetAttribute",
    "ShardSequence",
    "SliceArgument",
    "Step",
    "Swap",
    "SyncRouting",
    "TakeLoss",
    "above",
]
