"""``shardcore plan``: what one step takes on each rank, before any run."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import click

from shardcore.config import ShardConfig
from shardcore.config.recomputation import GradientCheckpointConfig
from shardcore.errors import ConfigError, NotSupportedError
from shardcore.inferred import inference
from shardcore.mesh.axes import AXES, Sizes
from shardcore.plan import ShardPlan
from shardcore.policy import Policy
from shardcore_cli.tables import in_words, say, show_table
from shardcore_planner import KINDS, Estimate, Workload, estimate
from shardcore_planner.calls import call_of
from shardcore_planner.cards import Card, Link
from shardcore_planner.cli.advice import advice
from shardcore_planner.cli.bars import Bar, picture
from shardcore_planner.cli.explain import parse_settings
from shardcore_planner.cli.pipelines import pipeline_to_json, show_pipeline, traffic_to_json
from shardcore_planner.cli.summary import tell_quantized
from shardcore_planner.preparing import planned
from shardcore_planner.results import Time
from shardcore_planner.search import Found, cost, ordered, seconds, timed
from shardcore_planner.search import search as meshes_of
from shardcore_transformers.models import meta_model

_UNITS = {"B": 1, **{f"{p}iB": 2 ** (10 * n) for n, p in enumerate("KMGT", 1)}}
_UNITS |= {f"{p}B": 1000**n for n, p in enumerate("KMGT", 1)}
_NAMES = {"temporaries": "temporaries of the optimizer"}
_TIMES = ("least", "most", "device", "host", "computing", "sending", "unknown", "waiting")
_LONGEST = 40  # signs of a path in a title


def bytes_of(text: str) -> int:
    """Return a number of bytes from text such as ``80GiB``.

    Raises:
        ConfigError: it is none.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B)\s*", text)
    if match is None or match[2] not in _UNITS:
        raise ConfigError(f"{text!r} is no amount of memory; wanted a number and a unit: 80GiB, 80GB, 500MiB")
    return int(float(match[1]) * _UNITS[match[2]])


def card_of(name: str | None, links: Sequence[str]) -> Card | None:
    """Return the card that options name, with what lies between ranks.

    Raises:
        ConfigError: there is no such card, a link is none, or there are links and no card.
    """
    if name is None:
        if links:
            raise ConfigError("--link tells the time of a step together with --card; give a card, such as --card h200")
        return None
    card = Card.of(name)
    found = dict(card.links)
    for text in links:
        axis, _, size = text.rpartition("=")
        if axis and axis not in AXES:
            raise ConfigError(f"--link {text}: there is no axis {axis!r}, only {', '.join(AXES)}")
        found[axis] = Link(rate=bytes_of(size))
    return dataclasses.replace(card, links=found)


def configuration(
    settings: Sequence[str], *, sequence: bool, checkpointing: bool, **sizes: int | str | None
) -> ShardConfig:
    """Return what the options say.

    Raises:
        ConfigError: a setting is none, or contradicts an option.
        NotSupportedError: settings do not work together.
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


def plan(source: str, config: ShardConfig, workload: Workload, policy: type[Policy] | None = None) -> Estimate:
    """Return what one step of the model takes.

    Raises:
        ShardcoreError: there is no such model, or it cannot be sharded or called so.
    """
    model: Any = tell_quantized(meta_model(source))
    if config.gradient_checkpoint_config is not None and hasattr(model.config, "use_cache"):
        model.config.use_cache = False  # what transformers sets then, and says of each class
    return estimate(model, config, workload, call_of, policy=policy)


def drafted(source: str) -> type[Policy]:
    """Return a policy that is inferred from a small copy of the model's class.

    Raises:
        ConfigError: there is no such model, or no policy fits.
    """
    return inference()(meta_model(source), "drafted", None)


def compiled(source: str, found: Sequence[Found], policy: type[Policy] | None = None) -> ShardPlan | None:
    """Return the plan of the first mesh that could be planned."""
    first = next((f.estimate for f in found if f.estimate is not None), None)
    return None if first is None else planned(meta_model(source), first.config, policy)


def to_json(model: str, found: Estimate, memory: int | None) -> dict[str, Any]:
    """Return an estimate as JSON data; sizes are bytes of one rank."""
    workload, sizes = found.workload, found.sizes
    card = None if workload.card is None else workload.card.name
    time = None if found.time is None else {name: getattr(found.time, name) for name in _TIMES}
    return {
        "model": model,
        "mesh": _mesh_to_json(sizes),
        "workload": {**{name: getattr(workload, name) for name in workload.__dataclass_fields__}, "card": card},
        "sequence_parallelism": found.config.enable_sequence_parallelism,
        "bytes": {**found.held, "activations": found.kept, "peak": found.peak},
        "peak": {"phase": found.peak_phase, **found.at_peak},
        "memory": memory,
        "fits": found.fits(memory),
        "collectives": traffic_to_json(found.traffic),
        "operations": found.operations,
        "calls": found.calls,
        "time": time,
        "sent": found.sent,
        "sent_per_sample": found.sent / found.samples,
        **({"pipeline": pipeline_to_json(found.pipeline)} if found.pipeline is not None else {}),
    }


def _mesh_to_json(sizes: Sizes) -> dict[str, int]:
    return {
        "pp": sizes.pp,
        "cp": sizes.cp,
        "tp": sizes.tp,
        "dp_replicate": sizes.dp_replicate,
        "dp_shard": sizes.dp_shard,
    }


def show(model: str, found: Estimate, memory: int | None) -> None:
    """Print an estimate as tables."""
    say(headline(model, found))
    held = {**found.held, "activations": found.kept}
    rows = [
        (_NAMES.get(kind, kind), in_words(held[kind]) if kind in held else "", in_words(found.at_peak[kind]))
        for kind in KINDS
    ]
    show_table(
        "memory of the rank that holds most",
        ("memory", "held", f"at the peak ({found.peak_phase})"),
        [*rows, ("all", "", in_words(found.peak))],
    )
    click.echo()
    if found.traffic:
        columns = ("phase", "operation", "axis", "ranks", "count", "bytes", "sent by each rank")
        show_table("collectives of a step", columns, _sent(found))
        click.echo()
    if found.pipeline is not None:
        show_pipeline(found.pipeline)
        click.echo()
    *rest, peak = _summary(found, memory)
    say("\n".join(rest))
    say(peak, "" if memory is None else "yes" if found.fits(memory) else "no")
    if found.fits(memory) is False:
        say(f"to make it fit, try {advice([alone(found)], 'more ranks (--tp, --dp, --pp)')}")


def mesh_in_words(sizes: Sizes) -> str:
    """Return the axes with more than one rank."""
    named = _mesh_to_json(sizes)
    return " x ".join(f"{axis} {size}" for axis, size in named.items() if size > 1) or "one rank"


def search(
    source: str,
    config: ShardConfig,
    workload: Workload,
    *,
    ranks: int,
    max_tp: int,
    memory: int | None,
    policy: type[Policy] | None = None,
) -> list[Found]:
    """Return every mesh of ``ranks`` ranks: those that fit first, by the time or the bytes sent for a sample.

    Raises:
        NotSupportedError: a pipeline is asked for.
        ShardcoreError: there is no such model, or it cannot be called so.
    """
    if (config.pipeline_parallel_size or 1) > 1:
        raise NotSupportedError(
            f"--search compares meshes without a pipeline, got pipeline_parallel_size={config.pipeline_parallel_size}; "
            "plan one such mesh at a time: shardcore plan MODEL --pp 2 --tp 4"
        )
    model = tell_quantized(meta_model(source))
    meshes = meshes_of(model, config, workload, call_of, ranks=ranks, max_tp=max_tp, memory=memory, policy=policy)
    found = list(meshes)
    return [*(fit := ordered(found, memory)), *(f for f in found if f not in fit)]


def search_to_json(model: str, found: Sequence[Found], memory: int | None) -> dict[str, Any]:
    """Return the meshes as JSON data, in their order."""
    return {
        "model": model,
        "memory": memory,
        "meshes": [
            {
                "mesh": _mesh_to_json(f.sizes),
                "fits": fits(f, memory),
                "problem": f.problem or None,
                "plan": None if f.estimate is None else to_json(model, f.estimate, memory),
            }
            for f in found
        ],
    }


def fits(found: Found, memory: int | None) -> bool:
    """Tell whether the step can run on a mesh."""
    return found.estimate is not None and found.estimate.fits(memory) is not False


def show_search(model: str, found: Sequence[Found], memory: int | None) -> None:
    """Print the meshes as a table, then why others are none."""
    first = next((f.estimate for f in found if f.estimate is not None), None)
    if first is not None:
        say(headline(model, first, mesh=False))
    by_time = timed(found)
    rows = [_mesh_row(f, f.estimate, memory, by_time=by_time) for f in found if f.estimate]
    title, costs = ("meshes, fastest first", "time") if by_time else ("meshes, cheapest traffic first", "sent")
    if not sys.stdout.isatty():
        show_table(title, ("mesh", "fits", "peak", f"{costs} for a sample", *KINDS), rows)
    else:
        axes = [(str(f.sizes.tp), str(f.sizes.dp_shard), str(f.sizes.dp_replicate)) for f in found if f.estimate]
        narrow = [(*sizes, *row[1:]) for sizes, row in zip(axes, rows, strict=True)]
        columns = ("tp", "dp_shard", "dp_replicate", "fits", "peak", costs, *KINDS)
        if not show_table(title, columns, narrow, spare=len(KINDS)):
            say("Memory by kind: --svg, --html, --json, or a wider terminal.")
        say("time: of one sample, at most." if by_time else "sent: by each rank, for one sample.")
    for f in found:
        if f.estimate is None:
            say(f"{mesh_in_words(f.sizes)}: {f.problem}")
    if not any(fits(f, memory) for f in found):
        say(f"\nno mesh fits: try {advice(found, 'more --ranks')}", "no", err=True)


def _mesh_row(found: Found, estimate: Estimate, memory: int | None, *, by_time: bool) -> tuple[str, ...]:
    return (
        mesh_in_words(found.sizes),
        "yes" if fits(found, memory) else "no",
        f"{in_words(estimate.peak)} ({estimate.peak_phase})",
        _seconds(seconds(found)) if by_time else in_words(cost(found)),
        *(in_words(estimate.at_peak[kind]) for kind in KINDS),
    )


def alone(estimate: Estimate) -> Found:
    """Return a plan as the only one that was found."""
    return Found(sizes=estimate.sizes, estimate=estimate)


def drawing(model: str, found: Sequence[Found], memory: int | None) -> str:
    """Return the picture of the plans, as SVG."""
    plans = [f.estimate for f in found if f.estimate is not None]
    title = headline(model, plans[0], mesh=False) if plans else model
    return picture(title, [bar for plan in plans for bar in bars_of(plan)], memory)


def bars_of(plan: Estimate) -> Iterator[Bar]:
    """Yield the bars of one plan: one, or one for each rank of a pipeline."""
    mesh = mesh_in_words(plan.sizes)
    if plan.pipeline is None:
        yield mesh, plan.at_peak
    else:
        yield from ((f"{mesh}: rank {rank.rank} on pp", rank.at_peak) for rank in plan.pipeline.ranks)


def answer(model: str, found: Sequence[Found], memory: int | None, *, search: bool, as_json: bool) -> None:
    """Print one plan, or the meshes that were looked at."""
    only = found[0].estimate if not search else None
    if as_json:
        data = search_to_json(model, found, memory) if only is None else to_json(model, only, memory)
        click.echo(json.dumps(data, indent=2))
    elif only is None:
        show_search(model, found, memory)
    else:
        show(model, only, memory)


def headline(model: str, found: Estimate, *, mesh: bool = True) -> str:
    """Return what was planned, in one line; of a long path to the model, its end."""
    config, work = found.config, found.workload
    parts = [
        _end_of(model),
        mesh_in_words(found.sizes) if mesh else "",
        f"batch {work.batch}",
        f"{work.seq} tokens" if work.seq else "",
    ]
    if found.pipeline is not None:
        parts += [f"{found.pipeline.schedule} of {found.pipeline.micro_batches} micro-batches"]
    parts += [str(work.dtype), "inference" if not work.trains else work.optimizer]
    parts += [f"adapters of rank {work.lora}"] if work.lora else []
    parts += ["float32 master weights"] if work.master_weights else []
    parts += ["sequence parallel"] if config.enable_sequence_parallelism else []
    parts += ["recomputed blocks"] if config.gradient_checkpoint_config else []
    return ", ".join(filter(None, parts))


def _sent(found: Estimate) -> Iterator[tuple[str, ...]]:
    for t in found.traffic:
        sizes = in_words(t.bytes), in_words(t.sent)
        yield t.phase, t.operation, t.axis, str(t.ranks), str(t.count), *sizes


def _summary(found: Estimate, memory: int | None) -> Iterator[str]:
    work = found.workload
    each = f" ({in_words(found.sent / found.samples)} for each sample of the step)" if found.samples > 1 else ""
    sender = "each rank" if found.pipeline is None else "that rank"
    yield f"{sender} sends {in_words(found.sent)} in a step{each}"
    computes = "each rank" if found.pipeline is None else "that rank"
    parts = ", ".join(f"{phase} {count / 1e12:.3g}" for phase, count in found.operations.items())
    yield f"{computes} computes {sum(found.operations.values()) / 1e12:.3g} TFLOP in a step ({parts})"
    if found.pipeline is not None:
        yield f"bubble: ranks of the pipeline wait {found.pipeline.bubble:.1%} of the time for each other, at least"
    if found.time is not None and work.card is not None:
        yield _time(found.time, work.card)
    limit = "" if memory is None else f": {'fits' if found.fits(memory) else 'does not fit'} into {in_words(memory)}"
    yield f"peak {in_words(found.peak)} in the {found.peak_phase}{limit}"


def _time(time: Time, card: Card) -> str:
    """Return how long a step takes, and what that is made of."""
    unknown = f" (not counted: --link for {', '.join(time.unknown)})" if time.unknown else ""
    sent = f"; sending {_seconds(time.sending)}{unknown}" if time.sending or unknown else ""
    least, most = map(_seconds, (time.least, time.most))
    return (
        f"a step takes {least if least == most else f'{least} to {most}'} on {card.name}: the device computes "
        f"{_seconds(time.device)}, the host calls operations for {_seconds(time.host)}{sent}"
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _end_of(path: str) -> str:
    if len(path) <= _LONGEST:
        return path
    end = path[1 - _LONGEST :]
    return f"…{end[max(end.find('/'), 0) :]}"
