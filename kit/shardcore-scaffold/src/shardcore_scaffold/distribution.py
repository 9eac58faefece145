"""The metadata of a pack: one form for all of them, from which ``pyproject.toml`` is written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

_BUILD = """\
[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"
"""

_WIDTH = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """What the metadata of a pack says; everything else in it follows from the name.

    Attributes:
        name: of the distribution, such as ``shard-stablelm``.
        version: its version.
        description: one line about it.
        dependencies: what it needs.
        extras: what else can be installed with it; ``tested`` is the range that the tests prove.
        matrix: the releases of each library that the tests run against.
        license: an SPDX expression, whose text is in the file ``LICENSE``; None for a pack that has none yet.
        authors: the names of those who wrote it.
        keywords: for the index of packages.
        classifiers: for the index of packages.
        urls: pages about it, by their labels.
        data: distributions that the tests read as files; nox installs them without what they depend on.
        whole: the whole kit is a part of every run of the tests of the repository that the pack is in.
        pytest: settings of pytest, for a pack that has a repository of its own.
    """

    name: str
    version: str = "0.1.0"
    description: str
    dependencies: Sequence[str]
    extras: Mapping[str, Sequence[str]]
    matrix: Mapping[str, Sequence[str]]
    license: str | None = None
    authors: Sequence[str] = ()
    keywords: Sequence[str] = ()
    classifiers: Sequence[str] = ()
    urls: Mapping[str, str] = field(default_factory=dict)
    data: Sequence[str] = ()
    whole: bool = False
    pytest: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> Self:
        """Return what the ``pyproject.toml`` of a pack, as read by `tomllib`, says."""
        project, tool = metadata["project"], metadata["tool"]
        return cls(
            name=project["name"],
            version=project["version"],
            description=project["description"],
            dependencies=project["dependencies"],
            extras=project["optional-dependencies"],
            matrix=tool["shardcore"]["matrix"],
            license=project.get("license"),
            authors=[author["name"] for author in project.get("authors", ())],
            keywords=project.get("keywords", ()),
            classifiers=project.get("classifiers", ()),
            urls=project.get("urls", {}),
            data=tool["shardcore"].get("data", ()),
            whole=tool["shardcore"].get("whole", False),
            pytest=tool.get("pytest", {}).get("ini_options", {}),
        )

    @property
    def short(self) -> str:
        """The name of the family: that of the entry point."""
        return self.name.removeprefix("shard-")

    @property
    def package(self) -> str:
        """The name of the package."""
        return self.name.replace("-", "_")

    def pyproject(self) -> str:
        """Return the text of ``pyproject.toml``."""
        project: dict[str, Any] = {
            "name": self.name,
            "version": self.version,
            "description": self.description,
            "readme": "README.md",
        }
        if self.license is not None:
            project |= {"license": self.license, "license-files": ["LICENSE"]}
        project["requires-python"] = ">=3.11"
        project |= {"authors": [{"name": name} for name in self.authors]} if self.authors else {}
        project |= {"keywords": self.keywords} if self.keywords else {}
        project |= {"classifiers": self.classifiers} if self.classifiers else {}
        project["dependencies"] = self.dependencies
        sections = [
            _BUILD,
            _table("project", project),
            *([_table("project.urls", self.urls)] if self.urls else []),
            _table("project.optional-dependencies", self.extras),
            _table('project.entry-points."shardcore.packs"', {self.short: f"{self.package}.plugin"}),
            "# The releases the tests run against; nox reads this table.\n"
            + _table("tool.shardcore.matrix", self.matrix),
        ]
        settings = {name: value for name, value in (("data", self.data), ("whole", self.whole)) if value}
        if settings:
            about = "# What the tests read as files, and whether all of the kit is run each time; for nox.\n"
            sections.append(about + _table("tool.shardcore", settings))
        sections.append(_table("tool.hatch.build.targets.wheel", {"packages": [f"src/{self.package}"]}))
        if self.pytest:
            sections.append(_table("tool.pytest.ini_options", self.pytest))
        return "\n".join(sections)


def _table(name: str, values: Mapping[str, Any]) -> str:
    return f"[{name}]\n" + "".join(f"{key} = {_value(key, value)}\n" for key, value in values.items())


def _value(key: str, value: Any) -> str:
    """Return a value as TOML: text, a number, or a list of texts, one on each line if they do not fit into one."""
    if not isinstance(value, list | tuple):
        return json.dumps(value, ensure_ascii=False)
    items = [_item(item) for item in value]
    line = f"[{', '.join(items)}]"
    if len(f"{key} = {line}") <= _WIDTH and key != "classifiers":
        return line
    return "[\n" + "".join(f"    {item},\n" for item in items) + "]"


def _item(item: Any) -> str:
    """Return one of a list: text, or a table such as an author."""
    if isinstance(item, Mapping):
        pairs = (f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in item.items())
        return f"{{ {', '.join(pairs)} }}"
    return json.dumps(item, ensure_ascii=False)
