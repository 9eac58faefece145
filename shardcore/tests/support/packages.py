"""The packages of the core and of the distributions around it, file by file."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

#: Around the core: package -> those that it may import. Arrows go down: the core imports none of them.
_MODELS = {"shardcore", "shardcore_transformers"}
AROUND = {
    "shardcore_loop": {"shardcore"},
    "shardcore_shardformer": {"shardcore", "shardcore_loop"},
    "shardcore_transformers": {"shardcore"},
    "shardcore_quantized": {"shardcore"},
    "shardcore_peft": _MODELS,
    "shardcore_trainer": {*_MODELS, "shardcore_peft"},
    "shardcore_cli": _MODELS,
    "shardcore_debug": {"shardcore"},
    "shardcore_planner": {*_MODELS, "shardcore_cli"},
    "shardcore_testing": {*_MODELS, "shardcore_cli", "shardcore_planner"},
    "shardcore_scaffold": {*_MODELS, "shardcore_cli", "shardcore_planner", "shardcore_testing"},
}
EVERY = ("shardcore", *AROUND)


def root_of(package: str) -> Path:
    """Return the folder of a package, which is not imported."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def files_of(*packages: str) -> Iterator[tuple[str, Path]]:
    """Yield name and path of every module."""
    for package in packages:
        root = root_of(package)
        for file in sorted(root.rglob("*.py")):
            yield ".".join((package, *file.relative_to(root).with_suffix("").parts)), file
