"""``shardcore explain``: the plan for a model, on the meta device."""

from __future__ import annotations

import ast
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from shardcore.cli.pipelines import show_stages, stages_to_json
from shardcore.compile import compile_plan
from shardcore.config import ShardConfig
from shardcore.config.recomputation import GradientCheckpointConfig
from shardcore.errors import ConfigError
from shardcore.integrations.models import meta_model
from shardcore.plan import ShardPlan
from shardcore.plan.cut import Cut
from shardcore.planner import Collective, StagePart, collectives, parameter_bytes, stage_parts
from shardcore.planner.stages import parameter_bytes_by_stage
from shardcore.plugins.registry import default_registry

__all__ = ["Explained", "difference", "explain", "parse_settings", "read_plan", "show"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """A plan and what follows from it.

    Attributes:
        plan: of the whole model.
        bytes_per_rank: of parameters, on each rank of ``tp``; of a pipeline on those of its first rank, then of the
            second one, and so on.
        collectives: of the whole model.
        stages: of a pipeline.
    """

    plan: ShardPlan
    bytes_per_rank: list[int]
    collectives: list[Collective]
    stages: list[StagePart]

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON data."""
        sent = [
            {"where": c.where, "phase": c.phase, "operation": c.operation, "payload": c.payload}
            for c in self.collectives
        ]
        return {
            "plan": self.plan.to_json(),
            "digest": self.plan.digest,
            "bytes_per_rank": self.bytes_per_rank,
            "collectives": sent,
            **({"stages": stages_to_json(self.stages)} if self.stages else {}),
        }


def explain(
    model: str, *, tp: int, dp: int, pp: int = 1, settings: Sequence[str] = (), device: str | None = None
) -> Explained:
    """Compile the plan for ``model`` (see `shardcore.integrations.models.meta_model`).

    Args:
        model: the model.
        tp: tensor-parallel ranks.
        dp: data-parallel ranks.
        pp: ranks of a pipeline.
        settings: further fields of the configuration, as ``name=value``.
        device: where the model would run, ``"cuda"`` or ``"cpu"``; by default what this machine has.

    Raises:
        ConfigError: there is no such model, or a setting is not one.
        NotSupportedError: a later release will support a setting, or its policy does not say where it can be cut.
        NoPolicyError: no installed pack serves it.
        PlanError: its policy does not fit at these sizes.
    """
    native = meta_model(model)
    registry = default_registry()
    policy, origin = registry.policy_for(type(native))
    config = ShardConfig.of(**{"tp": tp, "dp": dp, "pp": pp, **parse_settings(settings)}).resolve(tp * dp * pp)
    plan = compile_plan(
        policy,
        native,
        config,
        origin=origin,
        modules=registry.modules_for(config),
        delegates=registry.policy_for,
        device_type=device,
    )
    if pp == 1:
        return Explained(plan=plan, bytes_per_rank=parameter_bytes(plan), collectives=collectives(plan), stages=[])
    held = parameter_bytes_by_stage(plan, Cut.by(plan.config, native, plan.stages))
    return Explained(
        plan=plan,
        bytes_per_rank=[size for rank in held for size in rank],
        collectives=collectives(plan),
        stages=stage_parts(native, plan),
    )


def parse_settings(texts: Sequence[str]) -> dict[str, Any]:
    """Return the fields of the configuration that ``name=value`` texts give.

    Raises:
        ConfigError: one is no setting, or is given twice.
    """
    settings: dict[str, Any] = {}
    for name, value in map(_setting, texts):
        if name in settings:
            raise ConfigError(f"the setting {name} is given twice; give it once")
        settings[name] = value
    return settings


def _setting(text: str) -> tuple[str, Any]:
    """Return the field and the value of ``name=value``; what is no Python literal is a string.

    For ``gradient_checkpoint_config`` a whole number counts blocks, and any other is a ratio.
    """
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"{text!r} is no setting; wanted name=value, such as enable_flash_attention=auto")
    plain = {"true": True, "false": False, "none": None}
    try:
        parsed = plain[value.lower()] if value.lower() in plain else ast.literal_eval(value)
    except (ValueError, SyntaxError, TypeError):  # a TypeError for what cannot be a key
        parsed = value
    if name == "gradient_checkpoint_config" and isinstance(parsed, float):
        parsed = GradientCheckpointConfig(gradient_checkpointing_ratio=parsed)
    elif name == "gradient_checkpoint_config" and type(parsed) is int:
        parsed = GradientCheckpointConfig(num_ckpt_layers=parsed)
    return name, parsed


def show(explained: Explained) -> None:
    """Print the plan as a tree, and the stages as a table; plain text without a terminal."""
    _show_plan(explained)
    if explained.stages:
        click.echo()
        show_stages(explained.stages)


def _show_plan(explained: Explained) -> None:
    summary = list(_summary(explained))
    if not sys.stdout.isatty():
        click.echo("\n".join([explained.plan.render(), *summary]))
        return
    from rich.console import Console
    from rich.tree import Tree

    head, *lines = explained.plan.render().split("\n")
    tree = Tree(head)
    branch = tree
    for line in lines:
        if line.startswith("    "):
            branch.add(line.strip())
        else:
            branch = tree.add(f"[bold]{line}[/bold]")
    console = Console()
    console.print(tree)
    console.print("\n".join(summary))


def _summary(explained: Explained) -> Iterator[str]:
    low, high = _mebibytes(min(explained.bytes_per_rank)), _mebibytes(max(explained.bytes_per_rank))
    size = high if low == high else f"{low} to {high}"
    shards = explained.plan.config.dp_shard_size or 1
    yield f"parameters per rank: {size}" + (f", divided by {shards} over dp_shard" if shards > 1 else "")
    counts = Counter((c.phase, c.operation) for c in explained.collectives)
    sent = ", ".join(
        f"{count} {operation} {phase}" for (phase, operation), count in sorted(counts.items(), reverse=True)
    )
    step = "collectives of all stages, for each micro-batch" if explained.stages else "collectives per step"
    yield f"{step}: {sent or 'none'}"


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


def read_plan(path: Path) -> dict[str, Any]:
    """Return a plan that was saved with ``--json``.

    Raises:
        ConfigError: the file holds something else.
    """
    try:
        data = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"{path} is no JSON file: {error}; save a plan with: shardcore explain MODEL --json"
        ) from error
    if not isinstance(data, dict) or "plan" not in data:
        raise ConfigError(f"{path} holds no plan; save one with: shardcore explain MODEL --json")
    return data


def difference(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return what differs between two plans saved as JSON, one line for each place."""
    return list(_difference("", before, after))


def _difference(path: str, before: Any, after: Any) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys([*before, *after]):
            place = f"{path}.{key}" if path else key
            if key not in before:
                yield f"+ {place}: {after[key]}"
            elif key not in after:
                yield f"- {place}: {before[key]}"
            else:
                yield from _difference(place, before[key], after[key])
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (left, right) in enumerate(zip(before, after, strict=True)):
            name = left.get("name", left.get("path", index)) if isinstance(left, dict) else index
            yield from _difference(f"{path}[{name}]", left, right)
    elif before != after:
        yield f"! {path}: {before} -> {after}"
