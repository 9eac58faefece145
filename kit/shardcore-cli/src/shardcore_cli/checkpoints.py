"""What `shardcore inspect` and `shardcore convert` do with a training checkpoint."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import click
import torch

import shardcore
from shardcore.checkpoint import Checkpoint
from shardcore.errors import ConfigError
from shardcore_cli.tables import show_table

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")

#: What ``--dtype`` may be.
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}


def contents(path: Path) -> dict[str, Any]:
    """Return what is in a checkpoint, as JSON; reads no tensor."""
    checkpoint = Checkpoint(path)
    index = checkpoint.index
    about = index.get("about") or {}
    libraries = {"torch": index["torch"], **about.get("libraries", {})}
    files: dict[str, set[str]] = {}
    for place, info in checkpoint.metadata.storage_data.items():
        files.setdefault(place.fqn, set()).add(info.relative_path)
    aliases = index.get("aliases", {})
    tensors = [
        {
            "name": name,
            "shape": list(size),
            "dtype": str(dtype).removeprefix("torch."),
            "bytes": checkpoint.bytes_of(name),
            "files": sorted(files.get(name, ())),
            "same_as": aliases.get(name),
        }
        for name, (size, dtype) in checkpoint.tensors.items()
    ]
    return {
        "path": str(checkpoint.path),
        "step": checkpoint.step,
        "model": about.get("class"),
        "config": about.get("config"),
        "libraries": libraries,
        "installed": {name: _installed(name) for name in libraries},
        "ranks": index["world"],
        "mesh": index["axes"],
        "bytes": sum(index["files"].values()),
        "tensors": tensors,
        "optimizer": _optimizer(index.get("optimizer")),
        "scheduler": index.get("scheduler"),
        "extra": index.get("extra"),
    }


def _installed(library: str) -> str | None:
    """Return the version of ``library`` that is installed here, without importing it; None if it is not."""
    known = {"torch": torch.__version__, "shardcore": shardcore.__version__}  # also from a tree
    if library in known:
        return str(known[library])
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def _optimizer(saved: Any) -> dict[str, Any] | None:
    if saved is None:
        return None
    groups = [{"parameters": len(group["parameters"]), "options": group["options"]} for group in saved["groups"]]
    return {"class": saved["kinds"][0], "groups": groups}


def _in_bytes(count: float) -> str:
    """Return a number of bytes in words, with three digits and a decimal unit: ``1.53 GB``."""
    unit = 0
    while count >= 999.5 and unit < len(_UNITS) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.3g} {_UNITS[unit]}"


def show(found: dict[str, Any]) -> None:
    """Print what `contents` has found."""
    mesh = ", ".join(f"{axis} {size}" for axis, size in found["mesh"].items()) or "no mesh"
    click.echo(f"{found['path']}: step {found['step']}, {_in_bytes(found['bytes'])}")
    others = {name: version for name, version in found["installed"].items() if version != found["libraries"][name]}
    notes = {
        name: f"{saved} (here {others[name] or 'none'})" for name, saved in found["libraries"].items() if name in others
    }
    click.echo(f"saved by {found['ranks']} ranks ({mesh}), {_listed({**found['libraries'], **notes})}")
    click.echo(f"model: {found['model'] or 'unknown'}")
    columns = ("tensor", "shape", "dtype", "size", "files")
    rows = [
        (
            row["name"],
            "x".join(map(str, row["shape"])) or "1 number",
            row["dtype"],
            _in_bytes(row["bytes"]),
            f"= {row['same_as']}" if row["same_as"] else ", ".join(row["files"]),
        )
        for row in found["tensors"]
    ]
    show_table(f"{len(rows)} tensors", columns, rows)
    for at, group in enumerate((found["optimizer"] or {"groups": ()})["groups"]):
        click.echo(
            f"{found['optimizer']['class']}, group {at}: {group['parameters']} parameters, {_listed(group['options'])}"
        )
    for name in ("scheduler", "extra"):
        if found[name] is not None:
            click.echo(f"{name}: {found[name]}")


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def convert(path: Path, out: Path, dtype: str | None, max_shard_size: str) -> list[str]:
    """Write the model of a checkpoint as a standard one and return the names of the files.

    Raises:
        ConfigError: a library that writes such files is missing.
    """
    try:
        from shardcore_transformers.exporting import export
    except ImportError as error:
        raise ConfigError(
            f"standard checkpoints are written by safetensors and huggingface_hub, which are not installed or do not "
            f"work ({error}); install them, or the model's pack, which brings them"
        ) from error

    wanted = None if dtype is None else DTYPES[dtype]
    return export(Checkpoint(path), out, dtype=wanted, max_shard_size=max_shard_size, shown=True)
