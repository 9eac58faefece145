"""A folder of installed packs, and classes for them to serve: what tests of the registry share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import given_packs as packs
import importlib_metadata
import pytest

from shardcore.errors import BrokenPackWarning
from shardcore.plugins.registry import GROUP, Registry

POLICY = """from shardcore.policy import Policy
class ModelPolicy(Policy): pass
class OtherPolicy(Policy): pass
NOT_A_CLASS = 1
"""


def plugin(*specs: str) -> str:
    """Return the source of a plugin that offers specs, each given as the arguments of PolicySpec."""
    return packs.offers("shardcore_policies", *(f"PolicySpec({spec})" for spec in specs))


def serves(package: str, target: str = "models.Model", rest: str = "") -> str:
    """Return the source of a plugin that serves one class."""
    return packs.serves(package, target, rest)


def model(name: str = "Model", module: str = "models", *bases: type) -> type:
    """Return a class with a full name of our choice."""
    return type(name, bases, {"__module__": module, "__qualname__": name})


def status(registry: Registry) -> dict[str, str]:
    return {pack.name: pack.status for pack in registry.packs}


@dataclass
class Site:
    """A folder of installed distributions, each with a package `shard_{name}` that has a plugin and `POLICY`."""

    root: Path

    def install(self, name: str, source: str, *, version: str = "1.0", entry: str = "") -> None:
        packs.install(self.root, name, source, version=version, modules={"policy": POLICY}, entry=entry)

    def library(self, name: str, version: str) -> None:
        packs.install_library(self.root, name, version)

    def discover(self) -> Registry:
        """Discover the packs of this folder; the environment of the tests may have others."""
        found = importlib_metadata.distributions(path=[str(self.root)])
        return Registry.discover(entry for dist in found for entry in dist.entry_points.select(group=GROUP))

    def broken(self) -> tuple[Registry, str]:
        """Discover, and return the text of the one warning too."""
        with pytest.warns(BrokenPackWarning) as caught:
            registry = self.discover()
        assert len(caught) == 1
        return registry, str(caught[0].message)
