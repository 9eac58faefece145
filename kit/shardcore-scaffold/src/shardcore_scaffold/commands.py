"""The command ``new-pack``, its help and its exit code; imports no torch before it needs it."""

from __future__ import annotations

from pathlib import Path

import click

from shardcore_cli.surroundings import answer_only, require_torch


@click.command(name="new-pack", short_help="Draft a pack for a class that none serves.")
@click.argument("name")
@click.option("--model", help="The model class it is for: of transformers, a folder with a config.json, or that file.")
@click.option(
    "--example",
    help="For any other class: package.module:function(seed, **options), which returns a small model and the arguments "
    "of a call by name.",
)
@click.option(
    "--into",
    default=Path(),
    type=click.Path(file_okay=False, path_type=Path),
    help="Where the folder is made [default: here]; made too if it is not there.",
)
@click.option(
    "--check/--no-check",
    default=True,
    show_default=True,
    help="Run the kit's quick checks on two ranks before anything is written, and leave out of the draft what fails.",
)
def new_pack(name: str, model: str | None, example: str | None, into: Path, check: bool) -> None:
    """Write a complete pack NAME for a model class that none serves.

    A small model of the class is run once, and autograd says what depends on what; the policy follows from that. It is
    compared with the model on two ranks, and does without what differs. What could not be split is named, with the
    reason.

    \b
    Example:
      shardcore new-pack shard-stablelm \\
        --model transformers.models.stablelm.modeling_stablelm.StableLmForCausalLM
    """  # noqa: D301  # click reads the control character, not the letters
    require_torch()
    from shardcore_scaffold import drafts as command

    with answer_only():
        files, draft = command.new_pack(name, model, example, into, checked=check)
    for file in files:
        click.echo(file)
    for doubt in dict.fromkeys(draft.doubts):
        click.echo(f"note: {doubt}")
    package = name.replace("-", "_")
    click.echo(
        f"\nNext: read {into / name / 'src' / package / 'policy.py'} beside the model's forward, then: "
        f"python -m pip install -e '{into / name}[testing]' && python -m pytest {into / name} --quick && "
        f"python -m pytest {into / name}"
    )
