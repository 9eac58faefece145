"""`shardcore profile`; imports no torch before it needs it."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(
    name="profile",
    short_help="Say where the steps of a training script go.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog="Exit code 1 if the script ended before its steps were profiled.",
)
@click.option("--skip", type=click.IntRange(1), default=5, show_default=True, help="Steps before, of another kind.")
@click.option("--steps", type=click.IntRange(1), default=3, show_default=True, help="Steps that are profiled.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("profile"),
    show_default=True,
    help="Folder for the profile of each rank.",
)
@click.argument("script", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def profile(skip: int, steps: int, out: Path, script: Path, arguments: tuple[str, ...]) -> None:
    """Run SCRIPT with its ARGUMENTS until some of its steps were profiled, and print where they went.

    A step is one of the script's optimizer. Each rank writes a profile of torch into the folder, in which the parts of
    a sharded model have their names. Options of this command come before SCRIPT.

    \b
    Examples:
      shardcore profile train.py
      torchrun --nproc-per-node 2 -m shardcore_cli profile train.py --tp 2
    """  # noqa: D301  # click reads the control character, not the letters
    from shardcore_loop.profiling import run

    if not run(script, arguments, skip=skip, steps=steps, out=out, say=click.echo):
        raise click.exceptions.Exit(1)
