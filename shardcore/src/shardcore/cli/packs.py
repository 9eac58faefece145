"""``shardcore packs``: what is installed. Imports no torch."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import warnings
from pathlib import Path
from typing import Any

import click

from shardcore.cli.tables import show_table
from shardcore.errors import BrokenPackWarning
from shardcore.plugins.isolation import in_full
from shardcore.plugins.registry import Pack, Registry
from shardcore.plugins.versions import tested

__all__ = ["describe", "show"]


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
    """Print the packs as a table; ``verbose`` adds where each of them is."""
    columns = ("pack", "distribution", "status", "serves", "tested with", "location")
    end = len(columns) if verbose else -1
    start = 1 if sys.stdout.isatty() and all(row["distribution"] == f"shard-{row['name']}" for row in rows) else 0
    show_table("installed packs", columns[start:end], [_cells(row)[start:end] for row in rows])
    if not rows:
        click.echo(
            "no pack is installed, so no model is served: install one (shard-llama, shard-bert, ...; the README lists "
            "all of them), or write one: shardcore new-pack --help",
            err=True,
        )


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    status = row["status"] if row["error"] is None else f"{row['status']}\n{row['error']}"
    serves = [name.rpartition(".")[2] for name in row["classes"]]
    serves += [f"{spec['target'].rpartition('.')[2]} by {spec['module']}" for spec in row["modules"]]
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
