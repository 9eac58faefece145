"""``shardcore plan``: what one step takes on each rank, before any run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import click

from shardcore.cli.explain import parse_settings
from shardcore.cli.tables import show_table
from shardcore.config import ShardConfig
from shardcore.config.recomputation import GradientCheckpointConfig
from shardcore.errors import ConfigError
from shardcore.integrations.calls import call_of
from shardcore.integrations.models import meta_model
from shardcore.planner import KINDS, Estimate, Workload, estimate

__all__ = ["bytes_of", "configuration", "in_words", "plan", "show", "to_json"]

_UNITS = {"": 1, "B": 1, **{f"{p}iB": 2 ** (10 * n) for n, p in enumerate("KMGT", 1)}}
_UNITS |= {f"{p}B": 1000**n for n, p in enumerate("KMGT", 1)}


def bytes_of(text: str) -> int:
    """Return a number of bytes from text such as ``80GiB``.

    Raises:
        ConfigError: it is none.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B|)\s*", text)
    if match is None or match[2] not in _UNITS:
        raise ConfigError(f"{text!r} is no amount of memory; wanted a number and a unit: 80GiB, 80GB, 500MiB")
    return int(float(match[1]) * _UNITS[match[2]])


def in_words(count: float) -> str:
    """Return a number of bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def configuration(settings: Sequence[str], *, sequence: bool, checkpointing: bool, **sizes: int | None) -> ShardConfig:
    """Return what the options say.

    Raises:
        ConfigError: a setting is none, or contradicts an option.
        NotSupportedError: a later release will support a setting.
    """
    fields: dict[str, Any] = {name: size for name, size in sizes.items() if size is not None}
    if sequence:
        fields["enable_sequence_parallelism"] = True
    if checkpointing:
        fields["gradient_checkpoint_config"] = GradientCheckpointConfig(gradient_checkpointing_ratio=1.0)
    given = parse_settings(settings)
    if twice := sorted(fields.keys() & given.keys()):
        raise ConfigError(f"{twice[0]} is given by an option and by --set; give it once")
    return ShardConfig.of(ShardConfig.of(**fields), **given)


def plan(source: str, config: ShardConfig, workload: Workload) -> Estimate:
    """Return what one step of the model takes.

    Raises:
        ShardcoreError: there is no such model, or it cannot be sharded or called so.
    """
    return estimate(meta_model(source), config, workload, call_of)


def to_json(model: str, found: Estimate, memory: int | None) -> dict[str, Any]:
    """Return an estimate as JSON data; sizes are bytes of one rank."""
    config, workload = found.config, found.workload
    return {
        "model": model,
        "mesh": {
            "tp": config.tensor_parallel_size,
            "dp_replicate": config.dp_replicate_size,
            "dp_shard": config.dp_shard_size,
        },
        "workload": {name: getattr(workload, name) for name in workload.__dataclass_fields__},
        "sequence_parallelism": config.enable_sequence_parallelism,
        "bytes": {**found.held, "activations": found.kept, "peak": found.peak},
        "peak": {"phase": found.peak_phase, **found.at_peak},
        "memory": memory,
        "fits": found.fits(memory),
        "collectives": [
            {
                "phase": t.phase,
                "operation": t.operation,
                "axis": t.axis,
                "ranks": t.ranks,
                "count": t.count,
                "bytes": t.bytes,
                "sent": t.sent,
            }
            for t in found.traffic
        ],
        "sent": found.sent,
        "sent_per_sample": found.sent / found.samples,
    }


def show(model: str, found: Estimate, memory: int | None) -> None:
    """Print an estimate as tables."""
    click.echo(_headline(model, found))
    held = {**found.held, "activations": found.kept}
    rows = [(kind, in_words(held[kind]), in_words(found.at_peak[kind])) for kind in KINDS]
    show_table(
        "memory of the rank that holds most",
        ("memory", "held", f"at the peak ({found.peak_phase})"),
        [*rows, ("all", "", in_words(found.peak))],
    )
    click.echo()
    columns = ("phase", "operation", "axis", "ranks", "collectives", "bytes", "sent by each rank")
    show_table("collectives of a step", columns, _sent(found))
    click.echo()
    click.echo("\n".join(_summary(found, memory)))


def mesh_in_words(config: ShardConfig) -> str:
    """Return the axes with more than one rank."""
    sizes = {
        "tp": config.tensor_parallel_size,
        "dp_shard": config.dp_shard_size,
        "dp_replicate": config.dp_replicate_size,
    }
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if (size or 1) > 1) or "one rank"


def _headline(model: str, found: Estimate) -> str:
    config, work = found.config, found.workload
    parts = [model, mesh_in_words(config), f"batch {work.batch}", f"{work.seq} tokens" if work.seq else ""]
    parts += [work.dtype, "inference" if not work.trains else work.optimizer]
    parts += ["float32 master weights"] if work.master_weights else []
    parts += ["sequence parallel"] if config.enable_sequence_parallelism else []
    parts += ["recomputed blocks"] if config.gradient_checkpoint_config else []
    return ", ".join(filter(None, parts))


def _sent(found: Estimate) -> Iterator[tuple[str, ...]]:
    for t in found.traffic:
        sizes = in_words(t.bytes), in_words(t.sent)
        yield t.phase, t.operation, t.axis, str(t.ranks), str(t.count), *sizes


def _summary(found: Estimate, memory: int | None) -> Iterator[str]:
    fits = found.fits(memory)
    limit = "" if memory is None else f": {'fits' if fits else 'does not fit'} into {in_words(memory)}"
    yield f"peak {in_words(found.peak)} in the {found.peak_phase}{limit}"
    each = f" ({in_words(found.sent / found.samples)} for each sample of the step)" if found.samples > 1 else ""
    yield f"each rank sends {in_words(found.sent)} in a step{each}"
