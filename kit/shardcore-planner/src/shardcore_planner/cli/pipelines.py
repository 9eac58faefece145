"""Pipelines for people and programs: what each stage holds, and what each rank takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from shardcore.plan.shard_plan import names_together
from shardcore_cli.tables import in_words, show_table
from shardcore_planner import PipelineEstimate, RankEstimate, StagePart, Traffic


def stages_to_json(parts: Sequence[StagePart]) -> list[dict[str, Any]]:
    """Return the stages as JSON data."""
    return [dataclasses.asdict(part) for part in parts]


def show_stages(parts: Sequence[StagePart]) -> None:
    """Print the stages as a table."""
    columns = (
        "stage",
        "rank on pp",
        "blocks",
        "also",
        "shared with stages",
        "parameters",
        "bytes",
        "share of the work",
    )
    show_table("stages", columns, map(_stage, parts))


def _stage(part: StagePart) -> tuple[str, ...]:
    shared = (f"{name} ({_others(part, stages)})" for name, stages in part.shared.items())
    return (
        str(part.stage),
        str(part.rank),
        names_together(part.blocks),
        ", ".join(part.parts),
        ", ".join(shared),
        f"{part.parameters:,}",
        in_words(part.bytes),
        f"{part.share:.1%}",
    )


def _others(part: StagePart, stages: Sequence[int]) -> str:
    others = [stage for stage in stages if stage != part.stage]
    return ", ".join(map(str, others)) if len(others) < 4 else f"{others[0]}-{others[-1]}"


def pipeline_to_json(found: PipelineEstimate) -> dict[str, Any]:
    """Return what a pipeline takes as JSON data; sizes are bytes."""
    return {
        "schedule": found.schedule,
        "micro_batches": found.micro_batches,
        "bubble": found.bubble,
        "ranks": [_rank_to_json(rank) for rank in found.ranks],
    }


def _rank_to_json(rank: RankEstimate) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "stages": list(rank.stages),
        "in_flight": rank.in_flight,
        "bytes": {**rank.held, "activations": rank.kept, "buffers": rank.buffers, "peak": rank.peak},
        "peak": {"phase": rank.peak_phase, **rank.at_peak},
        "collectives": traffic_to_json(rank.traffic),
        "sent": rank.sent,
    }


def traffic_to_json(traffic: Sequence[Traffic]) -> list[dict[str, Any]]:
    """Return what is sent as JSON data."""
    fields = ("phase", "operation", "axis", "ranks", "count", "bytes", "sent")
    return [{name: getattr(t, name) for name in fields} for t in traffic]


def show_pipeline(found: PipelineEstimate) -> None:
    """Print what each rank of a pipeline takes as a table."""
    columns = (
        *("rank on pp", "stages", "in flight", "parameters", "gradients", "optimizer"),
        *("activations in flight", "receive buffers", "peak", "sent along pp"),
    )
    show_table(f"ranks of the pipeline ({found.schedule})", columns, _ranks(found))


def _ranks(found: PipelineEstimate) -> Iterator[tuple[str, ...]]:
    for rank in found.ranks:
        held = (in_words(rank.held[kind]) for kind in ("parameters", "gradients", "optimizer"))
        along = sum(traffic.sent for traffic in rank.traffic if traffic.axis == "pp")
        yield (
            str(rank.rank),
            ", ".join(map(str, rank.stages)),
            str(rank.in_flight),
            *held,
            in_words(rank.kept),
            in_words(rank.buffers),
            f"{in_words(rank.peak)} ({rank.peak_phase})",
            in_words(along),
        )
