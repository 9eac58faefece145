"""Pipelines: a model cut into stages, each of which runs the model's own forward on the whole arguments of a call.

`cut` says which stage holds what, `rehearsal` finds out on meta what crosses from stage to stage, `hollow` leaves in a
model what its stage holds, and `stage` runs it.
"""

from shardcore.pipeline.batches import micro_batches
from shardcore.pipeline.model import PipelinedModel
from shardcore.pipeline.pipe import Pipeline
from shardcore.pipeline.rehearsal import Rehearsal
from shardcore.pipeline.schedules import SCHEDULES
from shardcore.pipeline.script import Crossing, Script, Value
from shardcore.pipeline.stage import Holding, Stage
from shardcore.plan.cut import Cut, balanced

__all__ = [
    "SCHEDULES",
    "Crossing",
    "Cut",
    "Holding",
    "Pipeline",
    "PipelinedModel",
    "Rehearsal",
    "Script",
    "Stage",
    "Value",
    "balanced",
    "micro_batches",
]
