from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import shardcore

HEAVY = ("torch", "transformers", "timm", "numpy")


def loaded_by(statement: str) -> set[str]:
    """Return the modules that a fresh interpreter holds after a statement."""
    source = str(Path(shardcore.__file__).parents[1])
    path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", f"{statement}\nimport sys\nprint(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": path},
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("statement", "own"),
    [
        ("import shardcore", {"shardcore"}),
        ("import shardcore.hooks", {"shardcore", "shardcore.hooks", "shardcore.errors"}),
        ("from shardcore import PolicySpec, hookimpl", {"shardcore", "shardcore.hooks", "shardcore.errors"}),
        ("import shardcore.errors", {"shardcore", "shardcore.errors"}),
        ("import shardcore._env", {"shardcore", "shardcore._env", "shardcore.errors"}),
        (
            "import shardcore.registry",
            {"shardcore", "shardcore.registry", "shardcore.hooks", "shardcore.errors", "shardcore._env"},
        ),
        (
            "from shardcore.registry import Registry; Registry.discover([])",
            {"shardcore", "shardcore.registry", "shardcore.hooks", "shardcore.errors", "shardcore._env"},
        ),
    ],
)
def test_light_modules_stay_light(statement: str, own: set[str]) -> None:
    loaded = loaded_by(statement)
    assert loaded.isdisjoint(HEAVY)
    assert {name for name in loaded if name.partition(".")[0] == "shardcore"} == own


def test_hooks_import_no_metadata_reader() -> None:
    """Every plugin pays for what hooks import, so that the registry's tools are not among it."""
    assert loaded_by("import shardcore.hooks").isdisjoint({"importlib_metadata", "packaging", "email"})


def test_the_check_can_fail() -> None:
    assert "torch" in loaded_by("import shardcore, torch")
    assert "shardcore.registry" in loaded_by("import shardcore\nshardcore.Registry")
