"""``shardcore packs``: what is installed. Imports no torch."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import warnings
from pathlib import Path
from typing import Any

import click

from shardcore.errors import BrokenPackWarning
from shardcore.plugins.isolation import in_full
from shardcore.plugins.registry import Pack, Registry
from shardcore.plugins.unserved import first_party, installing
from shardcore.plugins.versions import tested
from shardcore_cli.tables import say, show_table


def describe() -> list[dict[str, Any]]:
    """Return every installed pack as JSON data."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BrokenPackWarning)  # the table says it
        registry = Registry.discover()
    return [_row(pack) for pack in registry.packs]


def _row(pack: Pack) -> dict[str, Any]:
    return {
        "name": pack.name,
        "distribution": pack.distribution,
        "version": pack.version,
        "location": _location(pack),
        "status": pack.status,
        "error": in_full(pack.error) if pack.error else None,
        "classes": sorted({spec.target for spec in pack.specs}),
        "modules": [dataclasses.asdict(spec) for spec in pack.modules],
        "conformance_cases": list(pack.cases),
        "observes": sorted(pack.observers),
        "tested": [dataclasses.asdict(found) for found in tested(pack.distribution)],
    }


def _location(pack: Pack) -> str | None:
    """Return the file of the plugin, as far as it can be told without running any code of the pack."""
    top, *inner = pack.value.partition(":")[0].strip().split(".")
    try:
        spec = importlib.util.find_spec(top)  # of the name of a submodule it would import the package
    except Exception:
        return None
    if spec is None:
        return None
    for folder in spec.submodule_search_locations or ():
        below = Path(folder, *inner)
        found = next((file for file in (below.with_suffix(".py"), below / "__init__.py") if file.is_file()), None)
        if found is not None:
            return str(found)
    return spec.origin


def show(rows: list[dict[str, Any]], *, verbose: bool = False) -> None:
    """Print the packs: on a terminal the families of each, or with ``verbose`` its classes; in a pipe all of them."""
    if not rows:
        line, others = installing("shard-llama"), ", ".join(sorted(first_party() - {"shard-llama"}))
        click.echo(
            f"no pack is installed, so no model is served. Install one, such as shard-llama{line}; others: {others}. "
            "Or write one: shardcore new-pack --help",
            err=True,
        )
    if not sys.stdout.isatty():
        columns = ("pack", "distribution", "status", "serves", "tested with", "location")
        end = len(columns) if verbose else -1
        show_table("installed packs", columns[:end], [_cells(row)[:end] for row in rows])
    elif verbose:
        for row in rows:
            _show_in_full(row)
    elif rows:
        _show_in_short(rows)


def _show_in_short(rows: list[dict[str, Any]]) -> None:
    columns = ("pack", "status", "classes", "of")
    show_table("installed packs", columns, map(_short, rows))
    for row in rows:
        if row["error"] is not None:
            say(f"{row['distribution']}: {row['error']}", "broken")
        for found in row["tested"]:
            if not found["inside"] and not (found["optional"] and found["installed"] is None):
                say(f"{row['distribution']}: tested with {_range(found)}", "missing")
    say("Each class, and what it was tested with: shardcore packs -v")


def _short(row: dict[str, Any]) -> tuple[str, ...]:
    served = [*dict.fromkeys(map(_family, row["classes"])), *_modules(row)]
    return _named(row), row["status"], str(len(row["classes"])), ", ".join(served)


def _named(row: dict[str, Any]) -> str:
    """Return the distribution with its version, and the pack's own name where nobody could guess it."""
    name = "" if row["distribution"] == f"shard-{row['name']}" else f" ({row['name']})"
    return f"{row['distribution']} {row['version']}{name}"


def _family(target: str) -> str:
    """Return what a class belongs to: a family of transformers, or the library that it is from."""
    parts = target.split(".")
    return parts[2] if target.startswith("transformers.models.") and len(parts) > 3 else parts[0]


def _modules(row: dict[str, Any]) -> list[str]:
    return [f"{spec['target'].rpartition('.')[2]} by {spec['module']}" for spec in row["modules"]]


def _show_in_full(row: dict[str, Any]) -> None:
    say(f"{_named(row)}: {row['status']}", row["status"])
    if row["error"] is not None:
        say(f"    {row['error']}")
    served = [name.rpartition(".")[2] for name in row["classes"]]
    for part in (", ".join([*served, *_modules(row)]), *map(_range, row["tested"])):
        say(f"    {part}")
    click.echo(f"    {row['location'] or ''}\n")  # in one piece, to be copied


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    status = row["status"] if row["error"] is None else f"{row['status']}\n{row['error']}"
    serves = [name.rpartition(".")[2] for name in row["classes"]]
    serves += _modules(row)
    return (
        row["name"],
        f"{row['distribution']} {row['version']}",
        status,
        ", ".join(serves),
        "\n".join(map(_range, row["tested"])),
        row["location"] or "",
    )


def _range(found: dict[str, Any]) -> str:
    state = found["installed"] or "not installed"
    outside = ", outside" if found["installed"] and not found["inside"] else ""
    return f"{found['library']} {found['range']} ({state}{outside})"
