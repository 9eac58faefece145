"""What is tested against what: packs, releases and environments, read from the packs' own metadata.

A pack is a folder below ``packs/``. Its ``[tool.shardcore.matrix]`` names libraries and the releases of each that it is
tested against; a new pack or release edits nothing here.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

from environments import Environment  # from tools/

__all__ = ["Cell", "Pack", "cells_of", "find_packs", "floors_of", "lowest", "newest_of"]

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
        """Whether the whole conformance kit runs on the oldest release too, and not on the newest alone."""
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
    """Packs against one release of one library, in one run of pytest.

    Attributes:
        packs: the packs; one that is tested whole is alone, as where its users install it.
        library: the library.
        release: its release.
        environment: where the tests run.
        options: options of pytest. A library that has environments of its own selects what names it, and whether each
            policy has a case; the rest runs in the others. Tests of what only torch does run at the newest release.
        whole: the whole conformance kit, and tests that take long; else every mechanism and
            every family once, as in the quick run.
    """

    packs: tuple[Pack, ...]
    library: str
    release: str
    environment: Environment
    options: tuple[str, ...]
    whole: bool

    @property
    def name(self) -> str:
        """Name of the session."""
        return f"{self.packs[0].name}-{self.against}" if self.whole else self.against

    @property
    def is_newest(self) -> bool:
        """Whether it is the newest release of its library that a pack of it is tested against."""
        return self.release == max((pack.matrix[self.library][-1] for pack in self.packs), key=Version)

    @property
    def against(self) -> str:
        """The release, as the names of sessions and environments have it."""
        return f"{self.library}-{self.release}"


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
    """Return all cells: each pack whole, then the other releases from the newest on, with all packs that name them.

    Args:
        packs: the packs.
        torch: the requirement for torch of every environment but those that are apart.
    """
    whole: list[Cell] = []
    others: dict[tuple[str, str], list[Pack]] = {}
    for pack in packs:
        for library, releases in pack.matrix.items():
            for release in releases:
                if release == releases[-1] or (pack.whole and release == releases[0]):
                    whole.append(_cell((pack,), library, release, torch, whole=True))
                else:
                    others.setdefault((library, release), []).append(pack)
    shared = [_cell(tuple(named), *of, torch, whole=False) for of, named in others.items()]
    return [
        *sorted(whole, key=lambda cell: (not cell.is_newest, cell.library in APART, cell.name)),
        *sorted(shared, key=lambda cell: (cell.library, Version(cell.release)), reverse=True),
    ]


def _cell(packs: tuple[Pack, ...], library: str, release: str, torch: str, *, whole: bool) -> Cell:
    pin = f"{library}=={release}"
    others = () if library not in APART else tuple(f"{name}=={of}" for name, of in newest_of(packs).items())
    # A torch that a library has apart is installed once, with what has to match it.
    shared = next((pins for pins in APART.values() if pin in pins), (pin,))
    torches = shared if library == _EVERYWHERE else APART.get(library, (torch,))
    environment = Environment(f"{library}-{release}", torches, (*(() if library == _EVERYWHERE else (pin,)), *others))
    select = ("-k", f"{library} or every_policy") if library in APART else ()
    cell = Cell(packs, library, release, environment, select, whole)
    return cell if cell.is_newest else replace(cell, options=(*select, "-m", "not newest"))


def floors_of(requirements: Sequence[str], libraries: Iterable[str] = ()) -> Environment:
    """Return the environment of the lowest torch, and of the lowest releases of libraries, that requirements allow."""
    torch = lowest(requirements, "torch")
    floors = sorted(lowest(requirements, library) for library in libraries)
    named = (floor.replace("==", "-") for floor in (torch, *floors))
    return Environment("-".join(("lowest", *named)), (torch,), tuple(floors))


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
