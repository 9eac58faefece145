"""What is tested against what: packs, releases and environments, read from the packs' own metadata.

A pack is a folder below ``packs/``. Its ``[tool.shardcore.matrix]`` names libraries and the releases of each that it is
tested against; a new pack or release edits nothing here.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

from environments import Environment  # from tools/

__all__ = ["Cell", "Pack", "cells_of", "find_packs", "lowest", "newest_of", "whole_of"]

# Libraries that need a torch of their own: timm needs torchvision, which has to match torch.
APART: Mapping[str, tuple[str, ...]] = {"timm": ("torch==2.14.1", "torchvision==0.29.1")}
# What every environment has, in a release that is the same for all: a pack may be tested against others.
_EVERYWHERE = "torch"


@dataclass(frozen=True)
class Pack:
    """A distribution below ``packs/``."""

    folder: Path

    @property
    def name(self) -> str:
        """The name of the distribution."""
        return str(self._metadata["project"]["name"])

    @property
    def matrix(self) -> Mapping[str, Sequence[str]]:
        """Library -> the releases that it is tested against, oldest first."""
        matrix = self._metadata["tool"]["shardcore"]["matrix"]
        return {library: sorted(releases, key=Version) for library, releases in matrix.items()}

    def is_tested_with(self, pins: Iterable[str]) -> bool:
        """Tell whether its matrix has the releases that ``pins`` name of its libraries."""
        named = dict(pin.split("==") for pin in pins)
        return all(named.get(library, releases[-1]) in releases for library, releases in self.matrix.items())

    @property
    def data(self) -> Sequence[str]:
        """Distributions that its tests read as files, such as pretrained weights."""
        return list(self._metadata["tool"]["shardcore"].get("data", []))

    @property
    def whole(self) -> bool:
        """Whether every size runs in every run of the tests, on the oldest and the newest releases.

        Of the others sizes 1 and 2 on the newest release; the rest is left to the matrix.
        """
        return bool(self._metadata["tool"]["shardcore"].get("whole", False))

    @property
    def dependencies(self) -> Sequence[str]:
        """What it requires to be installed."""
        return list(self._metadata["project"].get("dependencies", []))

    def needed(self, packs: Sequence[Pack]) -> list[Pack]:
        """Return those of ``packs`` that it, or its extra ``testing``, requires, and the ones that they need.

        It derives from their policies, or its cases leave parts of models to them.
        """
        testing = self._metadata["project"].get("optional-dependencies", {}).get("testing", [])
        names = {Requirement(text).name for text in (*self.dependencies, *testing)}
        direct = [pack for pack in packs if pack.name in names]
        return [*direct, *(further for pack in direct for further in pack.needed(packs))]

    @cached_property
    def _metadata(self) -> dict[str, Any]:
        return tomllib.loads((self.folder / "pyproject.toml").read_text())


@dataclass(frozen=True)
class Cell:
    """One pack against one release of one library.

    Attributes:
        pack: the pack.
        library: the library.
        release: its release.
        environment: where the tests run.
        whole: every size of the conformance kit, and tests that take long; else sizes 1 and 2 only. What is the same
            for the models of a family is tested once for each; sessions ``whole-NAME`` test it for every case.
        tags: ``oldest``, ``newest`` or ``between``, then ``matrix``, the pack's name, and ``tests`` if it is a part of
            every run of the tests.
        options: options of pytest. A library that has environments of its own selects what names it, and whether each
            policy has a case; the rest runs in the others. Tests of what only torch does run at the newest release.
    """

    pack: Pack
    library: str
    release: str
    environment: Environment
    whole: bool
    tags: tuple[str, ...]
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the session."""
        return f"{self.pack.name}-{self.library}-{self.release}"


def find_packs(root: Path) -> list[Pack]:
    """Return the packs of a workspace, sorted by folder."""
    return [Pack(file.parent) for file in sorted(root.glob("packs/*/pyproject.toml"))]


def newest_of(packs: Iterable[Pack]) -> dict[str, str]:
    """Return library -> the newest release that a pack is tested against; without torch, and what is apart."""
    newest: dict[str, str] = {}
    for pack in packs:
        for library, releases in pack.matrix.items():
            if library not in (*APART, _EVERYWHERE):
                newest[library] = max(newest.get(library, releases[-1]), releases[-1], key=Version)
    return newest


def cells_of(packs: Sequence[Pack], torch: str) -> list[Cell]:
    """Return all cells: the newest releases first, then the oldest, then those between.

    Args:
        packs: the packs.
        torch: the requirement for torch of every environment but those that are apart.
    """
    found = [_cell(pack, library, release, torch) for pack in packs for library in pack.matrix
             for release in pack.matrix[library]]  # fmt: skip
    order = {"newest": 0, "oldest": 1, "between": 2}

    def rank(cell: Cell) -> tuple[int, bool, Version, str]:
        return order[cell.tags[0]], cell.library in APART, Version(cell.release), cell.pack.name

    return sorted(found, key=rank)


def _cell(pack: Pack, library: str, release: str, torch: str) -> Cell:
    releases = pack.matrix[library]
    at = "newest" if release == releases[-1] else "oldest" if release == releases[0] else "between"
    others = () if library not in APART else tuple(f"{name}=={of}" for name, of in newest_of([pack]).items())
    pin = f"{library}=={release}"
    # A torch that a library has apart is installed once, with what has to match it.
    shared = next((pins for pins in APART.values() if pin in pins), (pin,))
    torches = shared if library == _EVERYWHERE else APART.get(library, (torch,))
    always = at != "between" if pack.whole else at == "newest"
    tags = (at, "matrix", pack.name, *(("tests",) if always else ()))
    select = ("-k", f"{library} or every_policy") if library in APART else ()
    leave = ("-m", "not newest") if at != "newest" else ()
    name = whole_of(f"{library}-{release}") if pack.whole and at == "newest" else f"{library}-{release}"
    environment = Environment(name, torches, (*(() if library == _EVERYWHERE else (pin,)), *others))
    return Cell(
        pack, library, release, environment, whole=pack.whole and at != "between", tags=tags, options=(*select, *leave)
    )


def whole_of(environment: str) -> str:
    """Return the name of the environment of the packs that run whole, against what another environment has.

    Sessions that share an environment follow each other: at the newest release, which tests every pack, these run
    beside the others.
    """
    return f"{environment}-whole"


def lowest(requirements: Iterable[str], library: str) -> str:
    """Return the lowest release of a library that one of the requirements allows, as a pin.

    Raises:
        ValueError: none of them says ``>=`` of it.
    """
    floors = [
        Version(clause.version)
        for requirement in map(Requirement, requirements)
        if requirement.name == library
        for clause in requirement.specifier
        if clause.operator == ">="
    ]
    if not floors:
        raise ValueError(f"no lower limit of {library} in {list(requirements)}")
    return f"{library}=={max(floors)}"
