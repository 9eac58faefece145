"""The jobs of the workspace: ``nox -s tests``, ``nox -s demo``, ``nox -s lint``, ``nox -s docs``.

A pack is a folder below ``packs/``; its ``[tool.shardcore.matrix]`` names the releases that it is tested against, so
adding a pack edits nothing here.
"""

from __future__ import annotations

import os
import tempfile
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import nox
from nox.command import CommandFailed
from packaging.version import Version

# The one torch of every job; another one: SHARDCORE_TORCH=2.11.0 nox -s tests
TORCH = os.environ.get("SHARDCORE_TORCH", "2.13.0")

# Libraries that need an environment of their own: timm needs torchvision, which has to match torch.
APART = {"timm": ("torch==2.14.1", "torchvision==0.29.1")}

ROOT = Path(__file__).parent
TOTALS = ROOT / ".nox" / "totals"  # for .ci/run, which prints it after nox's own summary
TOOLS = ("ruff==0.17.5", "mypy==2.4.1")
DOCS = (
    "mkdocs==1.6.1",
    "mkdocs-material==9.8.1",
    "mkdocstrings==1.0.8",
    "mkdocstrings-python==2.0.11",
    "ruff==0.17.5",  # formats signatures
)

# The warning filters are pytest's, in pyproject.toml; nothing is downloaded; ranks share the cores of one machine.
ENV: dict[str, str | None] = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": None,
    "TOKENIZERS_PARALLELISM": "false",
}

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "virtualenv"
nox.options.sessions = ["lint", "tests"]


@nox.session
def tests(session: nox.Session) -> None:
    """Test the core without transformers, then each pack alone, then all packs together; arguments go to pytest."""
    totals = Totals()
    packs = find_packs()
    try:
        with tempfile.TemporaryDirectory() as folder:
            suites = Suites(session, Path(folder), totals)
            # What an earlier run left behind, if nox was told to reuse its environment.
            uninstall(session, *(name for pack in packs for name in (pack.name, *pack.newest)))
            suites.run("shardcore", "shardcore/tests", "./shardcore[testing]")
            for pack in packs:
                # The kit at sizes 1 and 2; the matrix runs the others.
                suites.run(pack.name, f"{pack.folder}/tests", pack.folder, *pins([pack]), data=pack.data, quick=True)
                uninstall(session, pack.name)
            suites.run("together", "tests", *(pack.folder for pack in packs), *pins(packs))
    finally:
        TOTALS.parent.mkdir(exist_ok=True)
        TOTALS.write_text(f"{totals}\n")
        print(totals, flush=True)
    if totals.broken:
        session.error(f"failed: {', '.join(totals.broken)}")


@nox.session
def demo(session: nox.Session) -> None:
    """Train a small Llama on two ranks."""
    llama = [pack for pack in find_packs() if pack.name == "shard-llama"]
    install(session, "./shardcore", *(pack.folder for pack in llama), *pins(llama))
    session.run("torchrun", "--standalone", "--nproc-per-node", "2", "examples/train_llama.py", env=ENV)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, format and types."""
    packs = find_packs()
    install(session, "./shardcore[testing]", *(pack.folder for pack in packs), *pins(packs), *TOOLS)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation into ``site``, which git ignores; a warning is an error. Needs no torch."""
    session.install(*DOCS)
    session.run("mkdocs", "build", "--strict", "--clean", "--site-dir", "site", env={"NO_MKDOCS_2_WARNING": "1"})


@dataclass(frozen=True)
class Pack:
    """A distribution below ``packs/``; ``folder`` is relative to the root, in the form that pip takes for a path."""

    folder: str

    @property
    def name(self) -> str:
        """The name of the distribution."""
        return str(self._metadata["project"]["name"])

    @property
    def newest(self) -> Mapping[str, str]:
        """The newest tested release of each library in its matrix."""
        matrix = self._metadata["tool"]["shardcore"]["matrix"]
        return {name: max(releases, key=Version) for name, releases in matrix.items() if name not in APART}

    @property
    def data(self) -> Sequence[str]:
        """Distributions that its tests read as files, such as pretrained weights."""
        return list(self._metadata["tool"]["shardcore"].get("data", []))

    @cached_property
    def _metadata(self) -> dict[str, Any]:
        return tomllib.loads((ROOT / self.folder / "pyproject.toml").read_text())


@dataclass
class Totals:
    """Counts of tests over several runs of pytest, and the names of the runs that failed."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    broken: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        skipped = f", {self.skipped} skipped" if self.skipped else ""
        return f"{self.passed} passed, {self.failed} failed{skipped}"

    def add(self, name: str, report: Path, *, success: bool) -> None:
        """Count a run; one that failed without naming a test (a crash, no tests found) counts as one failed test."""
        outcomes = list(read_outcomes(report)) if report.exists() else []
        failed = outcomes.count("failed")
        self.passed += outcomes.count("passed")
        self.skipped += outcomes.count("skipped")
        self.failed += failed if success else max(failed, 1)
        if not success:
            self.broken.append(name)


@dataclass(frozen=True)
class Suites:
    """Runs of pytest in one session, each counted in ``totals``; a run that fails does not stop the next."""

    session: nox.Session
    reports: Path
    totals: Totals

    def run(self, name: str, folder: str, *requirements: str, data: Sequence[str] = (), quick: bool = False) -> None:
        """Install what the suite needs on top of what there is, and run it.

        ``data`` are distributions that are read as files: what they depend on is not installed.
        """
        report = self.reports / f"{name}.xml"
        try:
            install(self.session, *requirements)
            if data:
                self.session.install("--no-deps", *data)
            options = ["--quick"] if quick else []
            self.session.run("pytest", folder, f"--junitxml={report}", *options, *self.session.posargs, env=ENV)
        except CommandFailed:
            self.totals.add(name, report, success=False)
        else:
            self.totals.add(name, report, success=True)


def find_packs() -> list[Pack]:
    """Return the packs of the workspace, sorted by folder."""
    files = sorted(ROOT.glob("packs/*/pyproject.toml"))
    return [Pack(f"./{file.parent.relative_to(ROOT).as_posix()}") for file in files]


def pins(packs: Sequence[Pack]) -> list[str]:
    """Return one requirement per library: the newest release that any of the packs is tested against."""
    newest: dict[str, str] = {}
    for pack in packs:
        for library, release in pack.newest.items():
            newest[library] = max(newest.get(library, release), release, key=Version)
    return [f"{library}=={release}" for library, release in sorted(newest.items())]


def install(session: nox.Session, *requirements: str) -> None:
    """Install torch, then the requirements without moving it; folders are installed as their users get them."""
    session.install(f"torch=={TORCH}")
    session.install(f"torch=={TORCH}", *requirements)


def uninstall(session: nox.Session, *names: str) -> None:
    """Remove distributions; one that is not there is no error."""
    if names:
        session.run("python", "-m", "pip", "uninstall", "--yes", "--quiet", *names, silent=True)


def read_outcomes(report: Path) -> Iterator[str]:
    """Yield ``passed``, ``failed`` or ``skipped`` for each test in a junit report; an error counts as failed.

    A test that fails and whose teardown fails too has two entries there and counts once.
    """
    outcomes: dict[tuple[str, str], str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        key = case.get("classname", ""), case.get("name", "")
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        if outcomes.get(key) != "failed":
            outcomes[key] = outcome
    yield from outcomes.values()
