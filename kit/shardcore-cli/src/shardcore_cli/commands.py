"""Commands about what is installed here and about training checkpoints; imports no torch before it needs it."""

from __future__ import annotations

import json
from pathlib import Path

import click

from shardcore_cli.surroundings import answer_only, require_torch


@click.command(
    short_help="List the installed packs and the classes they serve.", epilog="Exit code 1 if a pack is broken."
)
@click.option(
    "-v",
    "--verbose",
    is_flag=True,
    help="Also each class, the libraries it was tested with, and where it is installed.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def packs(verbose: bool, as_json: bool) -> None:
    """List the installed packs: what became of them, which classes they serve, what they were tested with.

    SHARDCORE_PACKS and SHARDCORE_DISABLE_PACKS choose among them; blocked packs are listed too.
    """
    from shardcore_cli.packs import describe, show

    with answer_only():
        rows = describe()
    click.echo(json.dumps(rows, indent=2)) if as_json else show(rows, verbose=verbose)
    if any(row["status"] == "broken" for row in rows):
        raise click.exceptions.Exit(1)


@click.command(short_help="Say what works on this machine.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--quick", is_flag=True, help="Start no processes that try to talk to each other.")
def doctor(as_json: bool, quick: bool) -> None:
    """Say what this machine has, and what will and will not work here, and why."""
    from shardcore_cli.doctor import examine, show

    with answer_only():
        findings = examine(trial=not quick)
    click.echo(json.dumps(findings, indent=2)) if as_json else show(findings)
    if any(finding["state"] == "fails" for finding in findings["checks"]):
        raise click.exceptions.Exit(1)


@click.command(
    short_help="Print what is in a training checkpoint.", epilog="Exit code 1 if the checkpoint is not complete."
)
@click.argument("checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def inspect(checkpoint: Path, as_json: bool) -> None:
    """Print what is in a training CHECKPOINT: its step, model, mesh, tensors, optimizer and extras; reads no tensor.

    CHECKPOINT is a folder that shardcore.save_checkpoint has made, or the folder of them: then the newest complete one.
    """
    require_torch()
    from shardcore_cli import checkpoints as command

    with answer_only():
        found = command.contents(checkpoint)
    click.echo(json.dumps(found, indent=2)) if as_json else command.show(found)


@click.command(
    short_help="Make a training checkpoint a standard one.", epilog="Exit code 1 if nothing could be written."
)
@click.argument("checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32", "float64"]),
    help="Of the floating-point weights [default: as they were saved].",
)
@click.option("--max-shard-size", default="5GB", show_default=True, help="Of one file; so much memory is needed.")
def convert(checkpoint: Path, out: Path, dtype: str | None, max_shard_size: str) -> None:
    """Write the model of a training CHECKPOINT into the folder OUT as a standard checkpoint in safetensors.

    Needs no accelerator and no ranks, and as much memory as one file. What is written is what save_pretrained would
    write: transformers reads it without shardcore. CHECKPOINT is one that shardcore.save_checkpoint has made, or the
    folder of them: then the newest complete one.

    \b
    Examples:
      shardcore convert runs/pretrain/checkpoints model
      shardcore convert runs/pretrain/checkpoints/step-500 model --dtype bfloat16 --max-shard-size 2GB
    """  # noqa: D301  # click reads the control character, not the letters
    require_torch()
    from shardcore_cli import checkpoints as command

    with answer_only():
        files = command.convert(checkpoint, out, dtype, max_shard_size)
    for file in files:
        click.echo(out / file)
