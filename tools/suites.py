"""What sessions of the noxfile run: pytest, or tools, in shared environments, with results that are kept."""

from __future__ import annotations

import functools
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import nox
from filelock import FileLock  # virtualenv's, which nox brings
from nox.command import CommandFailed

from cells import Pack, cells_of, find_packs, newest_of  # from tools/
from environments import Environment
from results import Result, Results, digest_of, total

__all__ = [
    "AROUND",
    "CLIENTS",
    "CORE",
    "ENV",
    "ENVIRONMENTS",
    "ENVIRONMENT_OF",
    "EVERYTHING",
    "NEWEST",
    "OWN",
    "PACKS",
    "RESULTS",
    "SNIPPETS",
    "SOURCES",
    "SOURCES_AROUND",
    "TESTS_AROUND",
    "TORCH",
    "Part",
    "Suite",
    "check",
    "core_suite",
    "everything",
    "pip",
    "small_first",
    "suite_of",
    "with_every_library",
]

ROOT = Path(__file__).parents[1]
CORE = ROOT / "shardcore"
#: Folders of distributions around the core.
AROUND = (ROOT / "clients", ROOT / "kit")
#: What is installed for tests besides packs: the core, and the distributions around it.
OWN = [str(CORE), *(str(file.parent) for room in AROUND for file in sorted(room.glob("*/pyproject.toml")))]
SOURCES_AROUND = [source for room in AROUND for source in sorted(room.glob("*/src"))]
#: Their tests, which run with the core's.
TESTS_AROUND = [str(room) for room in AROUND]
PACKS = find_packs(ROOT)
ENVIRONMENTS = ROOT / ".nox" / "environments"
RESULTS = Results(ROOT / ".nox" / "results")

# The torch of every environment that needs no other; another one: SHARDCORE_TORCH=2.14.1 nox -t tests
TORCH = f"torch=={os.environ.get('SHARDCORE_TORCH', '2.13.0')}"
# The environment of the newest releases, which their cells use too.
_PINS = sorted(newest_of(PACKS).items())
NEWEST = Environment("-".join(map("-".join, _PINS)), (TORCH,), tuple(map("==".join, _PINS)))
# The warning filters are pytest's, in pyproject.toml; nothing is downloaded, and no
# policy is of an earlier run; ranks share the cores of one machine.
ENV: dict[str, str | None] = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": None,
    "SHARDCORE_CACHE": "",
    "TOKENIZERS_PARALLELISM": "false",
}
# What the snippets of the documentation import.
SNIPPETS = ("accelerate==1.15.0", "bitsandbytes==0.50.2", "peft==0.21.2")
_TRAINING = ("trl==1.16.0", "datasets==5.2.0", "sentence-transformers==6.2.0")
#: The newest releases of everything that needs no torch of its own; `everything` installs the core and all packs there.
EVERYTHING = Environment("everything", (TORCH,), (*NEWEST.pins, *SNIPPETS, *_TRAINING))
# The newest environment of timm has every library of models.
_EVERY = next(cell.environment for cell in cells_of(PACKS, TORCH) if cell.library == "timm" and cell.is_newest)
#: The software that trains and calls models, in stacks: the newest releases, and the oldest that are served.
CLIENTS: Mapping[str, Environment] = {
    "newest": Environment(
        "clients-newest",
        _EVERY.torch,
        # PEFT 0.22, which transformers 5.24 asks for where it takes adapters itself, is not released.
        (
            *(pin for pin in _EVERY.pins if not pin.startswith("transformers=")),
            "transformers==5.23.0",
            *SNIPPETS,
            *_TRAINING,
            "ray[train]==2.60.0",
            "torchao==0.18.0",
            "lm-eval==0.4.13",
            "torchdata==0.11.0",
        ),
    ),
    "oldest": Environment(
        "clients-oldest", (TORCH,), ("transformers==4.57.6", "accelerate==1.12.0", "peft==0.18.0", "trl==0.25.1")
    ),
}
#: Session -> the environment that it installs into: of those with one, no two run at a time.
ENVIRONMENT_OF: dict[str, str] = {}
#: What the outcome of everything that calls packs depends on.
SOURCES = [CORE, *AROUND, *(pack.folder for pack in PACKS), ROOT / "tests", ROOT / "tools"]
# What the checks read.
_CHECKED = [
    ROOT / name
    for name in (
        *("shardcore", "clients", "kit", "packs", "tests", "tools", "docs", "benchmarks", "examples"),
        *("noxfile.py", "pyproject.toml", "mkdocs.yml"),
    )
]


@dataclass(frozen=True)
class Part:
    """What has a result of its own in a run of pytest.

    Attributes:
        name: what is tested.
        tests: the folder of the tests.
        requirements: what is installed on top of the environment; folders are installed as their users get them.
        sources: what the result depends on.
        data: distributions that are read as files: what they depend on is not installed.
    """

    name: str
    tests: Path
    requirements: Sequence[str]
    sources: Sequence[Path]
    data: Sequence[str] = ()


class Suite:
    """One run of pytest in a shared environment, whose results are kept.

    Args:
        session: the session.
        environment: where it runs; made if it is not there.
        parts: what is tested, in this order. If there are several, a part that passed before is left out.
        result: the name of the result, to which several parts add theirs; by default the session's.
        against: library and release, for the table.
        options: further options of pytest.
        alone: packs that are not among the requirements are removed.
        ready: the environment is one that `everything` has made, and nothing is installed.
        env: further environment variables of the tests.
    """

    def __init__(
        self,
        session: nox.Session,
        environment: Environment,
        parts: Sequence[Part],
        *,
        result: str = "",
        against: str = "",
        options: Sequence[str] = (),
        alone: bool = True,
        ready: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.session, self.environment = session, environment
        self.ready, self.against, self.alone = ready, against, alone
        self.env = dict(env or {})
        self.options = [*options, *session.posargs]
        self.result = result or session.name
        #: Name of a result -> its part.
        self.parts = {self.result if len(parts) == 1 else f"{self.result}-{part.name}": part for part in parts}

    def run(self) -> None:
        """Run it; a failure is the session's."""
        if not self.passes():
            self.session.error(f"{self.result} failed")

    def passes(self) -> bool:
        """Run what has not passed before, with the same sources, and keep the results."""
        settings = repr((self.environment.torch, self.environment.pins, self.options, self.env))
        digests = {
            name: f"{digest_of([*part.sources, ROOT / 'pyproject.toml'])} {settings}"
            for name, part in self.parts.items()
        }
        left = {name: part for name, part in self.parts.items() if not RESULTS.passed_before(name, digests[name])}
        if len(left) < len(self.parts):
            before = self.parts.keys() - left.keys()
            self.session.log(f"passed before, with the same sources: {', '.join(sorted(before))}")
        if not left:
            return True
        # Not the session's own folder for such files: nox makes that the TMPDIR of all that it runs, and the paths of
        # sockets by which processes hand tensors to each other are at most 107 bytes long. A checkout deep down hangs.
        report = RESULTS.folder / "reports" / f"{self.result}.xml"
        report.parent.mkdir(parents=True, exist_ok=True)
        lines = report.with_suffix(".jsonl")
        for file in (report, lines):
            file.unlink(missing_ok=True)
        start, success = time.monotonic(), False
        try:
            python = self._install(list(left.values()))
            start = time.monotonic()
            tests = [str(part.tests) for part in left.values()]
            written = [f"--junitxml={report}", "-p", "outcomes", f"--outcomes={lines}"]
            path = os.pathsep.join(filter(None, (self.env.get("PYTHONPATH"), str(ROOT / "tools"))))
            env = {**ENV, **self.env, "PYTHONPATH": path}
            self.session.run(str(python), "-m", "pytest", *tests, *written, *self.options, env=env, external=True)
            success = True
        except CommandFailed as failure:
            self.session.warn(str(failure))
        results = [
            Result.of(
                report,
                success=success,
                seconds=time.monotonic() - start,
                lines=lines,
                below=part.tests.relative_to(ROOT) if len(left) > 1 else None,
                name=name,
                suite=part.name,
                against=self.against,
                sources=digests[name],
            )
            for name, part in left.items()
        ]
        RESULTS.write(*results)
        self.session.log(f"{self.result}: {total(results)}")
        return not any(result.failed for result in results)

    def _install(self, parts: Sequence[Part]) -> Path:
        if self.ready:
            return everything(self.session)
        python = self.environment.make(ENVIRONMENTS, self._pip)
        if self.alone:
            self._pip(python, "uninstall", "--yes", *(pack.name for pack in PACKS))
        pins = [*self.environment.torch, *self.environment.pins]
        wanted = dict.fromkeys(place for part in parts for place in part.requirements)
        self._pip(python, "install", "--no-build-isolation", *pins, *wanted)
        if data := sorted({name for part in parts for name in part.data}):
            self._pip(python, "install", "--no-deps", *data)
        return python

    def _pip(self, python: Path, *arguments: str) -> None:
        pip(self.session, python, *arguments)


def check(
    session: nox.Session,
    make: Callable[[nox.Session], Path],
    *commands: Sequence[str],
    sources: Sequence[Path] = _CHECKED,
) -> None:
    """Call tools, all of them, and keep the outcome; each counts as one test.

    Args:
        session: the session; its name is that of the result.
        make: returns the interpreter of the environment that has the tools.
        *commands: what is called; a failure does not keep the next one from being called.
        sources: what the outcome depends on.
    """
    digest = f"{digest_of(sources)} {commands} {TORCH}"
    if RESULTS.passed_before(session.name, digest):
        session.log(f"{session.name} passed before, with the same sources")
        return
    start, failures = time.monotonic(), {}
    for command in commands:
        try:
            python = make(session)
            # Tools call each other by name.
            path = os.pathsep.join((str(python.parent), os.environ.get("PATH", "")))
            env = {**ENV, "NO_MKDOCS_2_WARNING": "1", "PATH": path}
            # As modules: the first line of a script names the folder in which it was installed, which may be gone.
            module = command[1:] if command[0] == "python" else ("-m", *command)
            session.run(str(python), *module, env=env, external=True)
        except CommandFailed as failure:
            session.warn(str(failure))
            failures[" ".join(command[:2])] = str(failure)
    result = Result(
        name=session.name,
        suite=session.name,
        passed=len(commands) - len(failures),
        failed=len(failures),
        failures=failures,
        sources=digest,
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
    pip(session, python, "install", "--no-build-isolation", *pins, *OWN, *packs)
    return python


def everything(session: nox.Session) -> Path:
    """Return the interpreter of `EVERYTHING`, with the core and all packs.

    Who shares it waits until it is made; what was installed from the same sources is left as it is.
    """
    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    with FileLock(ENVIRONMENTS / ".everything.lock"):
        python = EVERYTHING.make(ENVIRONMENTS, functools.partial(pip, session))
        stamp = python.parents[1] / "installed"
        packs = [pack.folder for pack in PACKS]
        folders = [part for folder in (*map(Path, OWN), *packs) for part in (folder / "src", folder / "pyproject.toml")]
        wanted = f"{digest_of(folders)} {EVERYTHING}"
        if not stamp.exists() or stamp.read_text() != wanted:
            session.log(f"installing {', '.join(EVERYTHING.pins)}, the core and {len(packs)} packs: about a minute")
            own = [*OWN, *map(str, packs)]
            pip(session, python, "install", "--no-build-isolation", *EVERYTHING.pins, *own)
            pip(session, python, "install", "--no-deps", *sorted({name for pack in PACKS for name in pack.data}))
            stamp.write_text(wanted)
    return python


def pip(session: nox.Session, python: Path, *arguments: str) -> None:
    """Call the pip of an interpreter; uv installs instead where it is there, but for torch where there is none yet.

    It is pip that knows where a machine keeps its builds of torch, and perhaps where it keeps anything else.
    """
    command, *rest = arguments
    torch = any(name.startswith("torch==") for name in rest) and not _has_torch(python)
    if command == "install" and not torch and (uv := _uv()):
        # Compiled, since many processes import it.
        options = ["--quiet", "--compile-bytecode", "--python", str(python)]
        try:
            session.run(uv, "pip", "install", *options, *rest, env=ENV, external=True)
            return
        except CommandFailed:
            session.warn("uv could not install it; pip tries")
    session.run(str(python), "-m", "pip", "--quiet", *arguments, env=ENV, external=True)


def _has_torch(python: Path) -> bool:
    return any(python.parents[1].glob("lib*/python*/site-packages/torch"))


def _uv() -> str | None:
    """Return uv, of the interpreter that runs nox or on the path."""
    beside = Path(sys.executable).with_name("uv")
    return str(beside) if beside.exists() else shutil.which("uv")


def core_suite(
    session: nox.Session, environment: Environment, *options: str, against: str = "", name: str = ""
) -> Suite:
    """Return the suite of the core and of what is around it, with options of pytest and the name of the result."""
    part = Part("shardcore", CORE / "tests", OWN, [CORE, *AROUND])
    options = (*TESTS_AROUND, *options)
    return Suite(session, environment, [part], result=name, against=against, options=options)


def small_first(packs: Sequence[Pack]) -> list[Pack]:
    """Return packs in the order of a quick run: the first case that shows a mechanism stands for it."""
    return sorted(packs, key=lambda pack: pack.name not in ("shard-gpt2", "shard-llama"))


def part_of(pack: Pack) -> Part:
    """Return the tests of a pack, which is installed with those that it needs."""
    folders = [pack.folder, *(other.folder for other in pack.needed(PACKS))]
    sources = [CORE / "src", *SOURCES_AROUND, ROOT / "packs" / "conftest.py", *folders]
    return Part(pack.name, pack.folder / "tests", [*OWN, *map(str, folders)], sources, pack.data)


def suite_of(
    session: nox.Session,
    packs: Sequence[Pack],
    environment: Environment,
    against: str,
    *,
    whole: bool = False,
    options: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    result: str = "",
) -> Suite:
    """Return the suite of packs, in one run of pytest.

    Args:
        session: the session.
        packs: the packs, which are installed with those that they need, and without others.
        environment: where it runs.
        against: library and release, for the table.
        whole: the whole conformance kit, and not every mechanism and every family once.
        options: further options of pytest.
        env: further environment variables of the tests.
        result: what the names of the results begin with; by default the session's.
    """
    parts = [part_of(pack) for pack in small_first(packs)]
    options = [*(() if whole else ("--quick",)), *options]
    return Suite(session, environment, parts, result=result, against=against, options=options, env=env)
