"""Policies that were inferred once, for the next run of the same class with the same configuration.

    class, configuration, sources and versions of all that counts ──digest──> FOLDER/Class-digest.json

A file holds what `shardcore_scaffold.infer` answered. Nothing in the folder is looked for in another way, so that any
of its files, or all, can be deleted at any time; what was not found is never kept.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import platform
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardcore.plugins.registry import default_registry
from shardcore.plugins.versions import installed

if TYPE_CHECKING:  # `shardcore doctor` asks where policies are, also where torch is broken
    from torch import nn

_OWN = ("shardcore", "shardcore_scaffold", "shardcore_testing", "shardcore_transformers")


def folder() -> Path | None:
    """Return where policies are kept: ``SHARDCORE_CACHE``, or shardcore's folder of the user's cache; None: nowhere."""
    named = os.environ.get("SHARDCORE_CACHE")
    if named is not None:
        return Path(named) / "inferred" if named else None
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardcore" / "inferred"


def place(model: nn.Module, config: str, *, proved: bool) -> Path | None:
    """Return the file that answers for a model of this configuration (JSON text); None where nothing can be kept.

    It is another one as soon as one of these is: a source file of the classes that the model and its configuration are
    made of, of shardcore, or of a pack; the version of torch, or of a library that has those classes. Where such a
    class has no file, as one that was typed into an interpreter, no answer can be told from an older one.
    """
    where, kinds = folder(), {type(module) for module in model.modules()} | {type(model.config)}
    names = {base.__module__ for kind in kinds for base in kind.__mro__}
    libraries = {name.partition(".")[0] for name in names}
    files = [getattr(sys.modules.get(name), "__file__", None) for name in names if _is_seen(name)]
    if where is None or None in files:
        return None
    packs = [(str(pack), pack.status, pack.value) for pack in default_registry().packs]
    packages = {*_OWN, *(value.partition(":")[0].partition(".")[0] for *_, value in packs)}
    asked = {
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        "config": json.loads(config, object_hook=_without_its_folder),
        "proved": proved,
        "packs": packs,
        "versions": {"python": platform.python_version(), **{name: installed(name) for name in libraries | {"torch"}}},
        "sources": _digest(map(Path, {*filter(None, files), *_sources(packages)})),
    }
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
    return where / f"{type(model).__name__}-{digest[:16]}.json"


def _is_seen(module: str) -> bool:
    """Tell whether a module's own text counts: torch's version says enough of torch, and Python's of its library."""
    name = module.partition(".")[0]
    return name != "torch" and name not in sys.stdlib_module_names


def _without_its_folder(part: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in part.items() if name != "_name_or_path"}


def _sources(packages: Iterable[str]) -> Iterable[str]:
    """Yield the files of packages, none of which is imported; a pack of one module has one."""
    for spec in filter(None, map(importlib.util.find_spec, packages)):
        for found in spec.submodule_search_locations or ():
            yield from map(str, Path(found).rglob("*.py"))
        if spec.origin is not None:
            yield spec.origin


def _digest(files: Iterable[Path]) -> str:
    """Return one digest of what is in files; where they are does not count."""
    each = sorted(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)
    return hashlib.sha256("".join(each).encode()).hexdigest()


def read(file: Path) -> dict[str, Any] | None:
    """Return what is kept in a file; None if there is none, or none that can be read."""
    try:
        told: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return told


def write(file: Path, told: Mapping[str, Any]) -> None:
    """Keep an answer; where that fails, it is said and nothing else happens."""
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=file.parent, delete=False) as new:
            json.dump(told, new, indent=1)
        Path(new.name).replace(file)  # readers see all of it or nothing
    except OSError as error:
        logging.getLogger("shardcore").warning(
            "the inferred policy could not be kept for the next run: %s; SHARDCORE_CACHE names another folder", error
        )


def said() -> str:
    """Return where policies are kept, and how many there are, in words."""
    where = folder()
    if where is None:
        return "nowhere: SHARDCORE_CACHE is empty"
    count = sum(1 for _ in where.glob("*.json"))
    return f"{count} in {where}; delete the folder to infer anew"
