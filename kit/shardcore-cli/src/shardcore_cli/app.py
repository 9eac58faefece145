"""The command ``shardcore``: its commands come from distributions, through entry points."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

import click
from importlib_metadata import EntryPoint, entry_points

import shardcore
from shardcore.errors import ShardcoreError
from shardcore.plugins.isolation import attempt, in_one_line
from shardcore.plugins.unserved import for_a_shell, installing
from shardcore_cli.commands import convert, doctor, inspect, packs

#: The group of entry points that name commands of click.
GROUP = "shardcore.commands"
#: Command -> the distribution of this project that has it.
_HOMES = {
    "calibrate": "shardcore-planner",
    "explain": "shardcore-planner",
    "plan": "shardcore-planner",
    "verify": "shardcore-testing",
    "new-pack": "shardcore-scaffold",
    "profile": "shardcore-loop",
}

_EPILOG = """\b
Exit codes: 0 all is well; 1 what was asked about is not well (a broken pack, a
plan that does not fit, differing plans); 2 the command line was not understood.
"""


class _Group(click.Group):
    """Finds commands among the entry points, and shows errors of shardcore as messages, not as tracebacks.

    A command that cannot be imported is one that says why; the others work.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*self.commands, *_offered()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if (own := super().get_command(ctx, cmd_name)) is not None:
            return own
        if (entry := _offered().get(cmd_name)) is not None:
            return _loaded(entry)
        if (home := _HOMES.get(cmd_name)) is not None:
            raise click.UsageError(
                f"{cmd_name!r} is a command of {home}, which is not installed{installing('kit')}", ctx
            )
        return None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            known = {*self.list_commands(ctx), *_HOMES}
            if args[0] not in known and (near := difflib.get_close_matches(args[0], known, n=1)):
                raise click.UsageError(f"{error.format_message()} Did you mean {near[0]!r}?", ctx) from error
            raise

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except ShardcoreError as error:
            click.echo(f"error: {for_a_shell(str(error))}", err=True)
            ctx.exit(1)


def _offered() -> Mapping[str, EntryPoint]:
    """Return the commands that are installed; of two with one name the first distribution's, by their names."""
    found = sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.dist.name if entry.dist else ""))
    return {entry.name: entry for entry in reversed(found)}


def _loaded(entry: EntryPoint) -> click.Command:
    try:
        command = attempt(entry.load, f"loading the command {entry.name}")
    except Exception as error:
        return _broken(entry, in_one_line(error))
    if isinstance(command, click.Command):
        return command
    return _broken(entry, f"{entry.value} is a {type(command).__name__}; wanted a command of click")


def _broken(entry: EntryPoint, why: str) -> click.Command:
    home = entry.dist.name if entry.dist else "an unknown distribution"

    def refuse() -> None:
        raise click.ClickException(f"{entry.name!r} of {home} cannot be loaded: {why}")

    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    return click.Command(entry.name, callback=refuse, short_help=f"Broken: {why}", context_settings=settings)


@click.group(cls=_Group, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(shardcore.__version__, prog_name="shardcore")
def main() -> None:
    """Shard unmodified models over many devices.

    Which models can be sharded is decided by the installed packs (see: shardcore packs). What would be done to a model
    is shown without weights and without an accelerator (see: shardcore explain).
    """


for _command in (packs, doctor, inspect, convert):
    main.add_command(_command)
