"""The commands ``explain`` and ``plan``, their help and their exit codes; imports no torch before it needs it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from shardcore_cli.surroundings import answer_only, require_torch

_MAX_TP_HELP = "With --search: the most tensor-parallel ranks, such as those of one host."
#: Those of `shardcore.config.pipelining` and of `shardcore_planner.workload`, which would import torch.
_SCHEDULES = ("gpipe", "1f1b", "interleaved", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev")
_OPTIMIZERS = ("adamw", "adamw-fused", "sgd", "sgd-momentum", "none")
_HTML_HELP = "Draw the mesh, the cuts and the memory of each rank into one file for a browser."
_BATCH_HELP = "Samples of each replica [default: 1; of a pipeline 1 in each micro-batch]."
_MICRO_BATCHES_HELP = "Of --pp: micro-batches of a step [default: 2 for each rank of the pipeline]."
_SEARCH_HELP = "List the meshes of --ranks ranks without pipelines, cheapest traffic first."
_CP_HELP = "Ranks that divide the tokens of each batch (context parallelism)."
_POLICY_HELP = "Infer a policy from a small copy of the class, where no pack serves it."
_DEVICE_HELP = "What computes; on cuda kernels keep less, and optimizers update all at once [default: cuda]."
_CARD_HELP = "Tell the time of a step on this device: h200, or a file of shardcore calibrate."
_LINK_HELP = "With --card: bytes that a rank sends in a second, on one axis or on all others; may be repeated."


@click.command(
    short_help="Show what would be done to a model.",
    epilog="Exit code 1 if the policy does not fit, or if the plans given to --diff differ.",
)
@click.argument("model", required=False)
@click.option("--tp", default=1, show_default=True, type=click.IntRange(1), help="Tensor-parallel ranks.")
@click.option("--dp", default=1, show_default=True, type=click.IntRange(1), help="Data-parallel ranks.")
@click.option("--pp", default=1, show_default=True, type=click.IntRange(1), help="Ranks of a pipeline.")
@click.option("--cp", default=1, show_default=True, type=click.IntRange(1), help=_CP_HELP)
@click.option(
    "--set", "settings", multiple=True, metavar="FIELD=VALUE", help="Any other field of ShardConfig; may be repeated."
)
@click.option("--sp", is_flag=True, help="Split activations along the sequence (sequence parallelism).")
@click.option("--policy", type=click.Choice(["infer"]), help=_POLICY_HELP)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), help="Where it would run [default: what is here].")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON (save it for --diff).")
@click.option(
    "--diff",
    nargs=2,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Compare two plans saved with --json.",
)
@click.option("--svg", type=click.Path(dir_okay=False, path_type=Path), help="Draw the mesh and the cuts.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help=_HTML_HELP)
@click.option("-v", "--verbose", is_flag=True, help="Also what becomes of each module.")
def explain(
    model: str | None,
    tp: int,
    dp: int,
    pp: int,
    cp: int,
    settings: tuple[str, ...],
    sp: bool,
    policy: str | None,
    device: str | None,
    as_json: bool,
    diff: tuple[Path, Path] | None,
    svg: Path | None,
    html: Path | None,
    verbose: bool,
) -> None:
    """Show what would be done to MODEL, without reading weights and without starting anything.

    MODEL is a folder with a config.json, a config.json, a model of the hub that is in the local cache, or a class name:
    of transformers (LlamaForCausalLM) or with its module (package.module.Class). Everything is compiled on the meta
    device. What comes first is what each rank holds and sends; -v adds what becomes of each module.

    \b
    Examples:
      shardcore explain LlamaForCausalLM --tp 4
      shardcore explain LlamaForCausalLM --tp 4 -v
      shardcore explain ./checkpoint --tp 4 --dp 2 --svg mesh.svg --html mesh.html
      shardcore explain ./checkpoint --tp 2 --set enable_all_optimization=true --device cuda
      shardcore explain ./checkpoint --tp 2 --set gradient_checkpoint_config=0.5
      shardcore explain ./checkpoint --tp 2 --pp 2 --set pipeline_schedule=interleaved
      shardcore explain ./checkpoint --tp 2 --json > plan.json
      shardcore explain --diff before.json after.json
    """  # noqa: D301  # click reads the control character, not the letters
    require_torch()
    from shardcore_planner.cli import explain as command

    if diff:
        if model:
            raise click.UsageError("give either MODEL or --diff, not both")
        lines = command.difference(*map(command.read_plan, diff))
        click.echo("\n".join(lines) or "the plans are equal")
        raise click.exceptions.Exit(1 if lines else 0)
    if not model:
        raise click.UsageError("MODEL is missing; give a folder, a config.json or a class name, or use --diff A B")
    with answer_only():
        explained = command.explain(
            model,
            tp=tp,
            dp=dp,
            pp=pp,
            cp=cp,
            settings=(*settings, *(("enable_sequence_parallelism=true",) if sp else ())),
            device=device,
            infer=policy is not None,
            step=html is not None or not as_json,
        )
    if svg is not None:
        from shardcore_planner.cli.page import picture_of_a_plan

        svg.write_text(picture_of_a_plan(model, explained), encoding="utf-8")
    if html is not None:
        from shardcore_planner.cli.page import of_a_plan

        html.write_text(of_a_plan(model, explained), encoding="utf-8")
    if as_json:
        click.echo(json.dumps(explained.to_json(), indent=2))
    else:
        command.show(explained, verbose=verbose, hint="Each module: -v. Other batches and optimizers: shardcore plan.")


@click.command(
    short_help="Compute memory and traffic of a training step.",
    epilog="Exit code 1 if the policy does not fit, or the step does not fit into --memory.",
)
@click.argument("model")
@click.option("--tp", type=click.IntRange(1), help="Tensor-parallel ranks [default: 1].")
@click.option("--dp", type=click.IntRange(1), help="Data-parallel ranks [default: 1].")
@click.option("--dp-replicate", type=click.IntRange(1), help="Of --dp, replicas with whole parameters [default: 1].")
@click.option("--pp", type=click.IntRange(1), help="Ranks of a pipeline [default: 1].")
@click.option("--cp", type=click.IntRange(1), help=f"{_CP_HELP[:-1]} [default: 1].")
@click.option("--schedule", "pipeline_schedule", type=click.Choice(_SCHEDULES), help="Of --pp [default: 1f1b].")
@click.option("--chunks", "num_model_chunks", type=click.IntRange(1), help="Of --pp: stages of each rank.")
@click.option("--microbatches", "num_microbatches", type=click.IntRange(1), help=_MICRO_BATCHES_HELP)
@click.option(
    "--microbatch-size", type=click.IntRange(1), help="Samples in each micro-batch (instead of --microbatches)."
)
@click.option("--sp", is_flag=True, help="Split activations along the sequence (sequence parallelism).")
@click.option("--batch", type=click.IntRange(1), help=_BATCH_HELP)
@click.option("--seq", type=click.IntRange(1), help="Tokens of a sample [default: the model's most, up to 4096].")
@click.option(
    "--dtype",
    type=click.Choice(["bf16", "fp16", "fp32", "fp64"]),
    help="[default: what the configuration says, or else bf16]",
)
@click.option(
    "--optimizer",
    default="adamw",
    show_default=True,
    type=click.Choice(_OPTIMIZERS),
    help="What steps the parameters; none is inference.",
)
@click.option("--lora", type=click.IntRange(1), help="Train PEFT's adapters of this rank on all linears, and no more.")
@click.option("--master-weights", is_flag=True, help="The optimizer keeps parameters and its state in float32.")
@click.option("--checkpointing", is_flag=True, help="Recompute every block in the backward.")
@click.option(
    "--set", "settings", multiple=True, metavar="FIELD=VALUE", help="Any other field of ShardConfig; may be repeated."
)
@click.option("--policy", type=click.Choice(["infer"]), help=_POLICY_HELP)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), help=_DEVICE_HELP)
@click.option("--card", metavar="NAME", help=_CARD_HELP)
@click.option("--link", "links", multiple=True, metavar="[AXIS=]SIZE", help=_LINK_HELP)
@click.option("--memory", metavar="SIZE", help="What a rank has, with its unit: 80GiB, 80GB.")
@click.option("--search", is_flag=True, help=_SEARCH_HELP)
@click.option("--ranks", type=click.IntRange(1), help="With --search: all ranks.")
@click.option("--max-tp", default=8, show_default=True, type=click.IntRange(1), help=_MAX_TP_HELP)
@click.option("--svg", type=click.Path(dir_okay=False, path_type=Path), help="Draw the memory into this file.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help=_HTML_HELP)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def plan(
    model: str,
    tp: int | None,
    dp: int | None,
    dp_replicate: int | None,
    pp: int | None,
    cp: int | None,
    pipeline_schedule: str | None,
    num_model_chunks: int | None,
    num_microbatches: int | None,
    microbatch_size: int | None,
    sp: bool,
    checkpointing: bool,
    batch: int | None,
    settings: tuple[str, ...],
    policy: str | None,
    memory: str | None,
    device: str | None,
    card: str | None,
    links: tuple[str, ...],
    search: bool,
    ranks: int | None,
    max_tp: int,
    svg: Path | None,
    html: Path | None,
    as_json: bool,
    **work: Any,
) -> None:
    """Compute what one step of MODEL takes on each rank: memory, the bytes that are sent, and with --card the time.

    MODEL is a folder with a config.json, a config.json, or a class name. No weights are read and nothing is allocated:
    the sharded model runs on tensors that hold nothing, with a few of its blocks, among ranks that are not there.

    \b
    Examples:
      shardcore plan ./checkpoint --tp 8 --dp 4 --sp --batch 4 --seq 8192 --memory 80GiB
      shardcore plan ./checkpoint --search --ranks 32 --memory 80GiB --svg meshes.svg
      shardcore plan ./checkpoint --pp 4 --tp 8 --schedule interleaved --microbatches 16
      shardcore plan ./checkpoint --cp 8 --seq 131072 --memory 80GiB
      shardcore plan ./checkpoint --tp 8 --dp 4 --card h200 --link tp=450GB --link 50GB
      shardcore plan ./checkpoint --tp 8 --optimizer none --json
    """  # noqa: D301  # click reads the control character, not the letters
    require_torch()
    from shardcore_planner import Workload
    from shardcore_planner.cli import plan as command
    from shardcore_planner.cli.summary import batch_of

    limit = None if memory is None else command.bytes_of(memory)
    sizes = _sizes(search, ranks, tp=tp, dp=dp, pp=pp, cp=cp, dp_replicate_size=dp_replicate)
    pipeline = {
        "pipeline_schedule": pipeline_schedule,
        "num_model_chunks": num_model_chunks,
        "num_microbatches": num_microbatches,
        "microbatch_size": microbatch_size,
    }
    config = command.configuration(settings, sequence=sp, checkpointing=checkpointing, **sizes, **pipeline)
    rates = command.card_of(card, links)
    on = device or ("cuda" if rates is None else rates.device)
    workload = Workload(device=on, card=rates, batch=batch_of(config, batch), **work)
    with answer_only():
        inferred = command.drafted(model) if policy else None
        if search:
            found = command.search(
                model, config, workload, ranks=ranks or 1, max_tp=max_tp, memory=limit, policy=inferred
            )
        else:
            found = [command.alone(command.plan(model, config, workload, inferred))]
    if svg is not None:
        svg.write_text(command.drawing(model, found, limit), encoding="utf-8")
    if html is not None:
        _write_page(html, model, found, limit, inferred)
    command.answer(model, found, limit, search=search, as_json=as_json)
    if not any(command.fits(one, limit) for one in found):
        raise click.exceptions.Exit(1)


def _write_page(file: Path, model: str, found: Sequence[Any], limit: int | None, policy: Any) -> None:
    from shardcore_planner.cli.page import of_estimates
    from shardcore_planner.cli.plan import compiled

    with answer_only():
        drawn = compiled(model, found, policy)
    file.write_text(of_estimates(model, found, limit, drawn), encoding="utf-8")


def _sizes(search: bool, ranks: int | None, **sizes: int | None) -> dict[str, int | None]:
    """Return the sizes of the axes that were asked for; of a search, none."""
    if search and (ranks is None or any(sizes.values())):
        raise click.UsageError(
            "--search looks for the sizes: give --ranks, and no --tp, --dp, --pp, --cp or --dp-replicate"
        )
    if ranks is not None and not search:
        raise click.UsageError("--ranks belongs to --search")
    return sizes if search else {**sizes, "tp": sizes["tp"] or 1, "dp": sizes["dp"] or 1}


@click.command(short_help="Measure how fast this machine computes.")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--device", type=click.Choice(["cuda", "cpu"]), help="What is measured [default: what is here].")
def calibrate(file: Path, device: str | None) -> None:
    """Measure how fast this machine computes, in half a minute, and write FILE, which shardcore plan --card takes.

    Products in each dtype, memory, and what the host needs for an operation. Nothing else should run meanwhile; on a
    CPU, OMP_NUM_THREADS is that of a rank.

    \b
    Examples:
      shardcore calibrate card.json
      shardcore plan ./checkpoint --tp 2 --card card.json --link 10GB
    """  # noqa: D301  # click reads the control character, not the letters
    require_torch()
    import dataclasses

    import torch

    from shardcore_planner.calibrating import calibrated

    here = "cuda" if torch.cuda.is_available() else "cpu"
    card = calibrated(device or here, lambda line: click.echo(line, err=True))
    file.write_text(json.dumps(dataclasses.asdict(card), indent=2) + "\n", encoding="utf-8")
    rates = ", ".join(f"{name} {rate / 1e12:.3g}" for name, rate in card.products.items())
    click.echo(f"{card.name}: {rates} TFLOP/s, {card.memory / 1e9:.3g} GB/s, {card.call * 1e6:.1f} us for an operation")
