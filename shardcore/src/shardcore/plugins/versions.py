"""What packs require and were tested with, against what is installed. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

import importlib_metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Tested:
    """A library that a pack was tested with.

    Attributes:
        library: the name of its distribution.
        range: the releases that the pack names, as a PEP 440 specifier.
        installed: the version that is installed, or None.
        inside: whether that is in the range; False if there is none.
        optional: the pack does not depend on it without an extra.
    """

    library: str
    range: str
    installed: str | None
    inside: bool
    optional: bool


def tested(distribution: str) -> list[Tested]:
    """Return what the `tested` extra of an installed distribution names, as far as its metadata can be read."""
    try:
        lines = importlib_metadata.requires(distribution) or []
    except Exception:  # not installed, or metadata that is damaged in any way
        return []
    needed = {canonicalize_name(each.name) for line in lines if (each := _counting(line, "")) is not None}
    found = []
    for line in lines:
        if (requirement := _counting(line, "tested")) is not None and _counting(line, "") is None:
            version = installed(requirement.name)
            inside = version is not None and _contains(requirement, version)
            range_ = ",".join(sorted(map(str, requirement.specifier), key=_bound)) or "(any)"
            optional = canonicalize_name(requirement.name) not in needed
            found.append(
                Tested(library=requirement.name, range=range_, installed=version, inside=inside, optional=optional)
            )
    return found


def is_met(requires: str | None) -> bool:
    """Whether what is installed meets a requirement; one whose marker excludes this environment asks for nothing."""
    if requires is None:
        return True
    requirement = Requirement(requires)
    if requirement.marker is not None and not requirement.marker.evaluate():
        return True
    version = installed(requirement.name)
    return version is not None and _contains(requirement, version)


def installed(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None; one whose metadata is damaged has none."""
    try:
        return importlib_metadata.version(distribution)
    except Exception:
        return None


def _counting(line: str, extra: str) -> Requirement | None:
    """Return the requirement if it can be read and counts here with an extra, of which "" is none."""
    try:
        requirement = Requirement(line)
        counts = requirement.marker is None or requirement.marker.evaluate({"extra": extra})
    except Exception:  # no requirement, or a marker that compares what cannot be compared
        return None
    return requirement if counts else None


def _contains(requirement: Requirement, version: str) -> bool:
    try:
        return requirement.specifier.contains(version, prereleases=True)
    except InvalidVersion:
        return False


def _bound(specifier: str) -> tuple[bool, str]:
    """Sort floors before ceilings: metadata keeps no order."""
    return not specifier.startswith((">", "=", "~")), specifier
