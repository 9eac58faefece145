"""What could make a step fit that does not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardcore_planner import Estimate
from shardcore_planner.search import Found


def advice(found: Sequence[Found], more: str) -> str:
    """Return, as a list in words, what was not asked for and takes from the peaks of these meshes.

    Args:
        found: the meshes, none of which fits.
        more: how more ranks are asked for, which always helps.
    """
    named = dict.fromkeys(hint for f in found if f.estimate is not None for hint in _hints(f.estimate))
    *first, last = [*named, more]
    return f"{', '.join(first)} or {last}" if first else last


def _hints(estimate: Estimate) -> Iterator[str]:
    config, work = estimate.config, estimate.workload
    if estimate.peak_phase == "optimizer":
        if work.optimizer == "adamw" and estimate.at_peak["temporaries"]:
            yield "--optimizer adamw-fused"
        return
    if estimate.sizes.tp > 1 and not config.enable_sequence_parallelism:
        yield "--sp"
    if work.trains and config.gradient_checkpoint_config is None:
        yield "--checkpointing"
    if work.batch > (1 if estimate.pipeline is None else estimate.pipeline.micro_batches):
        yield "a smaller --batch"
