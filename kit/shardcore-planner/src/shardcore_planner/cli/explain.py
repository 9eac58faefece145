"""``shardcore explain``: the plan for a model, on the meta device."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from shardcore.config import ShardConfig
from shardcore.config.recomputation import GradientCheckpointConfig
from shardcore.errors import ConfigError
from shardcore.inferred import inference
from shardcore.plan import ShardPlan
from shardcore.plan.cut import Cut
from shardcore.plan.shard_plan import heading, modules
from shardcore_cli.tables import say
from shardcore_planner import Collective, Estimate, StagePart, collectives, parameter_bytes, stage_parts
from shardcore_planner.cli.pipelines import show_stages, stages_to_json
from shardcore_planner.cli.summary import step_of, summary, tell_quantized
from shardcore_planner.preparing import planned
from shardcore_planner.stages import parameter_bytes_by_stage
from shardcore_transformers.models import meta_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """A plan and what follows from it.

    Attributes:
        plan: of the whole model.
        bytes_per_rank: of parameters, on each rank of ``tp``; of a pipeline on those of its first rank, then of the
            second one, and so on.
        collectives: of the whole model.
        stages: of a pipeline.
        step: what one step takes, or why that is not known; None if it was not asked for.
    """

    plan: ShardPlan
    bytes_per_rank: list[int]
    collectives: list[Collective]
    stages: list[StagePart]
    step: Estimate | str | None = None

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
    model: str,
    *,
    tp: int,
    dp: int,
    pp: int = 1,
    cp: int = 1,
    settings: Sequence[str] = (),
    device: str | None = None,
    step: bool = False,
    infer: bool = False,
) -> Explained:
    """Compile the plan for ``model`` (see `shardcore_transformers.models.meta_model`).

    Args:
        model: the model.
        tp: tensor-parallel ranks.
        dp: data-parallel ranks.
        pp: ranks of a pipeline.
        cp: ranks that divide the tokens of each batch.
        settings: further fields of the configuration, as ``name=value``.
        device: where the model would run, ``"cuda"`` or ``"cpu"``; by default what this machine has.
        infer: by a policy that is drafted, not by that of a pack.
        step: also run a step among ranks that are not there, which takes some seconds more.

    Raises:
        ConfigError: there is no such model, or a setting is not one.
        NotSupportedError: settings do not work together, or its policy does not say where it can be cut.
        NoPolicyError: no installed pack serves it.
        PlanError: its policy does not fit at these sizes.
    """
    native = tell_quantized(meta_model(model))
    policy = inference()(native, "drafted", None) if infer else None
    given = ShardConfig.of(**{"tp": tp, "dp": dp, "pp": pp, "cp": cp, **parse_settings(settings)})
    config = given.resolve(tp * dp * pp * cp)
    plan = planned(native, config, policy, device_type=device)
    taken = step_of(native, given, policy) if step else None
    if pp == 1:
        held = parameter_bytes(plan)
        return Explained(plan=plan, bytes_per_rank=held, collectives=collectives(plan), stages=[], step=taken)
    by_stage = parameter_bytes_by_stage(plan, Cut.by(plan.config, native, plan.stages))
    return Explained(
        plan=plan,
        bytes_per_rank=[size for rank in by_stage for size in rank],
        collectives=collectives(plan),
        stages=stage_parts(native, plan),
        step=taken,
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


def show(explained: Explained, *, verbose: bool = False, hint: str = "") -> None:
    """Print a summary, and the stages as a table; ``verbose`` adds what becomes of each module.

    Args:
        explained: what is shown.
        verbose: show the modules, as a tree on a terminal.
        hint: a last line, for a person at a terminal.
    """
    say("\n".join([*heading(explained.plan), "", *in_short(explained)]))
    if explained.stages:
        click.echo()
        show_stages(explained.stages)
    if verbose:
        click.echo()
        _show_modules(list(modules(explained.plan)))
    elif hint and sys.stdout.isatty():
        click.echo(f"\n{hint}")


def in_short(explained: Explained) -> list[str]:
    """Return the lines of the summary."""
    step = explained.step if explained.step is not None else "it was not asked for"
    return list(
        summary(explained.plan, explained.bytes_per_rank, explained.collectives, step, staged=bool(explained.stages))
    )


def _show_modules(lines: list[str]) -> None:
    if not sys.stdout.isatty():
        click.echo("\n".join(lines))
        return
    from rich.console import Console
    from rich.text import Text
    from rich.tree import Tree

    tree = Tree(Text("modules"))
    branch = tree
    for line in lines:
        if line.startswith("    "):
            branch.add(Text(line.strip()))
        else:
            branch = tree.add(Text(line, style="bold"))
    Console(highlight=False).print(tree)


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
