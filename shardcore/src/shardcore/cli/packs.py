"""``shardcore packs``: what is installed. Imports no torch."""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

import importlib_metadata

from shardcore.cli.tables import show_table
from shardcore.errors import BrokenPackWarning
from shardcore.registry import Pack, Registry

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
        "error": f"{type(pack.error).__name__}: {pack.error}" if pack.error else None,
        "classes": sorted(spec.target for spec in pack.specs),
        "tested": _tested(pack.distribution),
    }


def _location(pack: Pack) -> str | None:
    try:
        spec = importlib.util.find_spec(pack.value.partition(":")[0])
    except (ImportError, ValueError):
        return None
    return spec.origin if spec else None


def _tested(distribution: str) -> list[dict[str, str | bool | None]]:
    """Return the ranges that the pack's ``tested`` extra names, against what is installed."""
    from packaging.requirements import Requirement

    try:
        requires = importlib_metadata.requires(distribution) or []
    except importlib_metadata.PackageNotFoundError:
        return []
    found = []
    for requirement in map(Requirement, requires):
        if requirement.marker is None or 'extra == "tested"' not in str(requirement.marker):
            continue
        try:
            installed: str | None = importlib_metadata.version(requirement.name)
        except importlib_metadata.PackageNotFoundError:
            installed = None
        inside = installed is not None and requirement.specifier.contains(installed, prereleases=True)
        found.append(
            {"library": requirement.name, "range": str(requirement.specifier), "installed": installed, "inside": inside}
        )
    return found


def show(rows: list[dict[str, Any]]) -> None:
    """Print the packs as a table."""
    columns = ("pack", "distribution", "status", "serves", "tested with", "location")
    show_table("installed packs", columns, [_cells(row) for row in rows])


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    status = row["status"] if row["error"] is None else f"{row['status']}\n{row['error']}"
    tested = [
        f"{t['library']} {t['range']} ({t['installed'] or 'not installed'}{'' if t['inside'] else ', outside'})"
        for t in row["tested"]
    ]
    classes = "\n".join(name.rpartition(".")[2] for name in row["classes"])
    return (
        row["name"],
        f"{row['distribution']} {row['version']}",
        status,
        classes,
        "\n".join(tested),
        row["location"] or "",
    )
