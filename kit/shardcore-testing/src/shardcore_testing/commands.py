"""The command ``verify``, its help and its exit code; imports no torch before it needs it."""

from __future__ import annotations

import json
import time

import click

from shardcore_cli.surroundings import answer_only, require_torch


@click.command(short_help="Compare a sharded model with the unsharded one.", epilog="Exit code 1 if anything differs.")
@click.argument("model")
@click.option("--tp", default=2, show_default=True, type=click.IntRange(1), help="Tensor-parallel ranks.")
@click.option(
    "--device", default="cpu", show_default=True, help="What ranks compute on: cpu, or cuda; they share cards."
)
@click.option(
    "--timeout", default=600.0, show_default=True, type=click.FloatRange(1), help="Limit of one section, in seconds."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def verify(model: str, tp: int, device: str, timeout: float, as_json: bool) -> None:
    """Compare a sharded model with the unsharded one, on this machine, on processes that this command starts.

    MODEL is the name of an installed pack, whose own tiny models go through every check of the conformance kit; or a
    folder with a config.json, a config.json, or a class name. Such a model is built as its configuration says, with
    random weights in float64, and trained for two steps beside its sharded twin: outputs, loss, every gradient, clipped
    norms and every parameter are compared.

    \b
    Examples:
      shardcore verify llama
      shardcore verify ./small/config.json --tp 4
      shardcore verify llama --device cuda
      shardcore verify llama --json > findings.json
    """  # noqa: D301  # click reads the control character, not the letters
    require_torch()
    from shardcore_testing import verify as command
    from shardcore_testing.watching import progress_bar

    with answer_only():
        command.check_device(device)
        jobs = command.jobs_for(model, tp)
    begin = time.monotonic()
    with progress_bar(jobs, quiet=as_json) as (progress, notes), answer_only():
        done = command.verify(jobs, tp, device=device, timeout=timeout, progress=progress, notes=notes)
    seconds = time.monotonic() - begin
    click.echo(json.dumps(command.to_json(done), indent=2)) if as_json else command.show(done, seconds)
    if not command.passed(done):
        raise click.exceptions.Exit(1)
