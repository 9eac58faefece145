"""Names that the configuration of a pipeline is made of."""

from __future__ import annotations

from shardcore.errors import ConfigError

#: The schedules; what each is in torch is in `shardcore.pipeline.schedules`.
SCHEDULE_NAMES = ("gpipe", "1f1b", "interleaved", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev")

#: Those of which each rank has several stages.
_LOOPED = SCHEDULE_NAMES[2:]

#: Those of which each rank has two, the second ones in the reverse order.
_TURNING = ("zbv", "dualpipev")

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


def chunks_of(schedule: str | None, chunks: int | None) -> int:
    """Return how many stages each rank has: ``chunks``, which the schedule has to allow, or what is usual."""
    schedule = schedule or "1f1b"
    usual = 2 if schedule in _LOOPED else 1
    if chunks is None:
        return usual
    if (schedule in _TURNING and chunks != 2) or (schedule not in _LOOPED and chunks != 1):
        raise ConfigError(
            f"pipeline_schedule={schedule!r} has {usual} stages on each rank, got num_model_chunks={chunks}; leave it "
            "None"
        )
    return chunks
