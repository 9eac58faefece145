"""Names that the configuration of a pipeline is made of."""

from __future__ import annotations

__all__ = ["PIPELINE_FIELDS", "SCHEDULE_NAMES", "SPLIT_SCHEDULES"]

#: The schedules; what each is in torch is in `shardcore.pipeline.schedules`.
SCHEDULE_NAMES = ("gpipe", "1f1b", "interleaved", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev")

#: Those that compute the gradients of inputs and of parameters apart.
SPLIT_SCHEDULES = SCHEDULE_NAMES[-3:]

#: The fields of `shardcore.ShardConfig` that say how a pipeline runs.
PIPELINE_FIELDS = (
    "pipeline_schedule",
    "num_model_chunks",
    "num_microbatches",
    "microbatch_size",
    "pipeline_bounds",
)
