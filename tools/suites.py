"""What sessions of the noxfile run: pytest, or tools, in shared environments, with results that are kept."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import nox
from nox.command import CommandFailed

from cells import Pack, cells_of, find_packs, newest_of, whole_of  # from tools/
from environments import Environment
from results import Result, Results, digest_of

__all__ = [
    "CLIENTS",
    "CORE",
    "ENV",
    "ENVIRONMENTS",
    "KITS",
    "NEWEST",
    "PACKS",
    "RESULTS",
    "SNIPPETS",
    "TORCH",
    "WHOLE",
    "Suite",
    "check",
    "pip",
    "suite_of",
    "with_every_library",
]

ROOT = Path(__file__).parents[1]
CORE = ROOT / "shardcore"
PACKS = find_packs(ROOT)
ENVIRONMENTS = ROOT / ".nox" / "environments"
RESULTS = Results(ROOT / ".nox" / "results")

# The torch of every environment that needs no other; another one: SHARDCORE_TORCH=2.14.1 nox -t tests
TORCH = f"torch=={os.environ.get('SHARDCORE_TORCH', '2.13.0')}"
# The environment of the newest releases, which their cells use too.
_PINS = sorted(newest_of(PACKS).items())
NEWEST = Environment("-".join(map("-".join, _PINS)), (TORCH,), tuple(map("==".join, _PINS)))
WHOLE = replace(NEWEST, name=whole_of(NEWEST.name))
# The warning filters are pytest's, in pyproject.toml; nothing is downloaded; ranks share the cores of one machine.
ENV: dict[str, str | None] = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": None,
    "TOKENIZERS_PARALLELISM": "false",
}
# What the snippets of the documentation import.
SNIPPETS = ("accelerate==1.15.0", "peft==0.21.2")
# The newest environment of timm has every library of models.
_EVERY = next(c.environment for c in cells_of(PACKS, TORCH) if c.library == "timm" and "newest" in c.tags)
#: The software that trains and calls models, in stacks: the newest releases, and the oldest that are served.
CLIENTS: Mapping[str, Environment] = {
    "newest": Environment(
        "clients-newest",
        _EVERY.torch,
        (*_EVERY.pins, *SNIPPETS, "trl==1.16.0", "datasets==5.2.0", "sentence-transformers==6.2.0"),
    ),
    "oldest": Environment(
        "clients-oldest", (TORCH,), ("transformers==4.57.6", "accelerate==1.12.0", "peft==0.18.0", "trl==0.25.1")
    ),
}
# What the checks read.
_CHECKED = ("shardcore", "packs", "tests", "tools", "docs", "benchmarks", "examples", "noxfile.py", "pyproject.toml",
            "mkdocs.yml")  # fmt: skip
#: How much of the conformance kit runs -> the options of pytest.
KITS: Mapping[str, tuple[str, ...]] = {
    "sizes 1 and 2": ("--quick",),
    "every size": ("--families",),
    "every case": (),
}
# Sessions of several suites, each of which has a result of its own.
_SEVERAL = ("capabilities", "minimums", "smoke")


class Suite:
    """One run of pytest in a shared environment, whose result is kept.

    Args:
        session: the session.
        environment: where it runs; made if it is not there.
        name: what is tested.
        tests: the folder of the tests.
        requirements: what is installed on top of the environment; folders are installed as their users get them.
        sources: what the result depends on.
        against: library and release, for the table.
        data: distributions that are read as files: what they depend on is not installed.
        options: further options of pytest.
        alone: packs that are not among the requirements are removed.
        env: further environment variables of the tests.
    """

    def __init__(
        self,
        session: nox.Session,
        environment: Environment,
        name: str,
        tests: Path,
        requirements: Sequence[str],
        sources: Sequence[Path],
        *,
        against: str = "",
        data: Sequence[str] = (),
        options: Sequence[str] = (),
        alone: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.session, self.environment, self.name, self.tests = session, environment, name, tests
        self.requirements, self.data, self.against, self.alone = requirements, data, against, alone
        self.env = dict(env or {})
        self.options = [*options, *session.posargs]
        self.result = f"{session.name}-{name}" if session.name in _SEVERAL else session.name
        settings = repr((environment.torch, environment.pins, self.options, self.env))
        self.sources = f"{digest_of([*sources, ROOT / 'pyproject.toml'])} {settings}"

    def run(self) -> None:
        """Run it; a failure is the session's."""
        if not self.passes():
            self.session.error(f"{self.result} failed")

    def passes(self) -> bool:
        """Run it, unless it passed before, and keep the result."""
        if RESULTS.passed_before(self.result, self.sources):
            self.session.log(f"{self.result} passed before, with the same sources")
            return True
        report = Path(self.session.create_tmp()) / f"{self.result}.xml"
        lines = report.with_suffix(".jsonl")
        for file in (report, lines):
            file.unlink(missing_ok=True)
        start, success = time.monotonic(), False
        try:
            python = self._install()
            start = time.monotonic()
            written = [f"--junitxml={report}", "-p", "outcomes", f"--outcomes={lines}"]
            env = {**ENV, **self.env, "PYTHONPATH": str(ROOT / "tools")}
            self.session.run(
                str(python), "-m", "pytest", str(self.tests), *written, *self.options, env=env, external=True
            )
            success = True
        except CommandFailed as failure:
            self.session.warn(str(failure))
        result = Result.of(
            report,
            success=success,
            seconds=time.monotonic() - start,
            lines=lines,
            name=self.result,
            suite=self.name,
            against=self.against,
            sources=self.sources,
        )
        RESULTS.write(result)
        self.session.log(f"{self.result}: {result}")
        return not result.failed

    def _install(self) -> Path:
        python = self.environment.make(ENVIRONMENTS, self._pip)
        if self.alone:
            self._pip(python, "uninstall", "--yes", *(pack.name for pack in PACKS))
        pins = [*self.environment.torch, *self.environment.pins]
        self._pip(python, "install", "--no-build-isolation", *pins, *self.requirements)
        if self.data:
            self._pip(python, "install", "--no-deps", *self.data)
        return python

    def _pip(self, python: Path, *arguments: str) -> None:
        pip(self.session, python, *arguments)


def check(session: nox.Session, environment: Environment, *commands: Sequence[str]) -> None:
    """Call tools, all of them, and keep the outcome; each counts as one test.

    Args:
        session: the session; its name is that of the result.
        environment: has the tools; made if it is not there.
        *commands: what is called; a failure does not keep the next one from being called.
    """
    sources = f"{digest_of([ROOT / name for name in _CHECKED])} {environment.pins} {TORCH}"
    if RESULTS.passed_before(session.name, sources):
        session.log(f"{session.name} passed before, with the same sources")
        return
    start, failures = time.monotonic(), {}
    for command in commands:
        try:
            python = environment.make(ENVIRONMENTS, functools.partial(pip, session))
            pip(session, python, "install", *environment.pins)
            # Tools call each other by name.
            path = os.pathsep.join((str(python.parent), os.environ.get("PATH", "")))
            env = {**ENV, "NO_MKDOCS_2_WARNING": "1", "PATH": path}
            session.run(str(python.with_name(command[0])), *command[1:], env=env, external=True)
        except CommandFailed as failure:
            session.warn(str(failure))
            failures[" ".join(command[:2])] = str(failure)
    result = Result(
        name=session.name,
        suite=session.name,
        passed=len(commands) - len(failures),
        failed=len(failures),
        failures=failures,
        sources=sources,
        seconds=time.monotonic() - start,
    )
    RESULTS.write(result)
    session.log(f"{session.name}: {result}")
    if failures:
        session.error(f"failed: {', '.join(failures)}")


def with_every_library(session: nox.Session) -> Path:
    """Return the interpreter of an environment that has every library, with the core and all packs."""
    environment = CLIENTS["newest"]
    python = environment.make(ENVIRONMENTS, functools.partial(pip, session))
    packs = [str(pack.folder) for pack in PACKS]
    pins = [*environment.torch, *environment.pins]
    pip(session, python, "install", "--no-build-isolation", *pins, f"{CORE}[testing]", *packs)
    return python


def pip(session: nox.Session, python: Path, *arguments: str) -> None:
    """Call the pip of an interpreter."""
    session.run(str(python), "-m", "pip", "--quiet", *arguments, env=ENV, external=True)


def suite_of(
    session: nox.Session,
    pack: Pack,
    environment: Environment,
    against: str,
    *,
    kit: str,
    options: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Suite:
    """Return the suite of a pack, with one of `KITS`."""
    folders = [pack.folder, *(needed.folder for needed in pack.needed(PACKS))]
    return Suite(
        session,
        environment,
        pack.name,
        pack.folder / "tests",
        [f"{CORE}[testing]", *map(str, folders)],
        [CORE / "src", ROOT / "packs" / "conftest.py", *folders],
        against=against,
        data=pack.data,
        options=[*KITS[kit], *options],
        env=env,
    )
