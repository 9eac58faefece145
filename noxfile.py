"""The jobs of the workspace: ``nox``, ``nox -s parallel``, ``nox -t matrix``, and others by their names.

``nox`` alone is for a contributor before a commit: style, types, documentation (the tag ``checks``), and a few minutes
of tests (``smoke``). ``.ci/run`` is ``nox -s parallel``: the sessions of ``nox -t tests checks``, two at a time.

Each pack is tested against the releases that its ``[tool.shardcore.matrix]`` names: a session for each, such as
``shard-llama-transformers-5.0.0``. Tags: ``tests`` (the core; packs that ask for every size, against the oldest and the
newest release; the other packs, sizes 1 and 2, against the newest; all packs together), ``matrix`` (all releases, and
the whole conformance kit of every pack: every size and every case), ``newest`` and ``oldest``, ``quick`` (sizes 1 and 2
against the newest release), ``pythons`` (the core with each other Python that is here), and the name of each pack. One
environment for each release serves all of them (at the newest, packs that ask for every size have another, beside the
others), and those of one torch share its files.

Results are kept in ``.nox/results``, with a table. A session that passed is not run again as long as what it tests is
unchanged, so a run that was interrupted is resumed by the same command; ``nox -s forget`` starts anew.
``nox -s capabilities`` runs the quick kits with the kernels of every kind of processor that the machine has.
"""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import nox
from nox.command import CommandFailed

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT / "tools"))

import lanes  # noqa: E402
from cells import Cell, Pack, cells_of, lowest, newest_of  # noqa: E402  # from tools/
from environments import Environment, capabilities_here, find_python  # noqa: E402
from room import lacking  # noqa: E402  # from tools/
from suites import (  # noqa: E402
    CLIENTS,
    CORE,
    ENV,
    ENVIRONMENTS,
    NEWEST,
    PACKS,
    RESULTS,
    SNIPPETS,
    TORCH,
    WHOLE,
    Suite,
    check,
    pip,
    suite_of,
    with_every_library,
)

# Ruff formats the signatures in the documentation too.
TOOLS = ("ruff==0.17.5", "mypy==2.4.1")
DOCS = ("mkdocs==1.6.1", "mkdocs-material==9.8.1", "mkdocstrings==1.0.8", "mkdocstrings-python==2.0.11")
# The checks share it; it has no torch: mypy reads that of the newest releases.
CHECKS = Environment("checks", (), (*TOOLS, *DOCS))
COVERAGE = Environment("coverage", (TORCH,), ("coverage==7.15.0",))
PYTHONS = ("3.11", "3.12", "3.13")
# Session -> the environment that it installs into, for `parallel`; the checks install into that of `types` too.
ENVIRONMENT_OF = {**dict.fromkeys(("lint", "types", "docs", "smoke"), NEWEST.name), "together": WHOLE.name}

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "virtualenv"
nox.options.sessions = ["lint", "types", "docs", "smoke"]


@nox.session(venv_backend="none", tags=["checks"])
def lint(session: nox.Session) -> None:
    """Check style and format."""
    check(session, CHECKS, ["ruff", "check", "."], ["ruff", "format", "--check", "."])


@nox.session(venv_backend="none", tags=["checks"])
def types(session: nox.Session) -> None:
    """Check types, against the newest releases."""
    project = nox.project.load_toml(CORE / "pyproject.toml")["project"]
    requirements = [*project["dependencies"], *project["optional-dependencies"]["testing"]]
    python = NEWEST.make(ENVIRONMENTS, functools.partial(pip, session))
    pip(session, python, "install", *NEWEST.torch, *NEWEST.pins, *requirements)
    check(session, CHECKS, ["mypy", "--python-executable", str(python)])


@nox.session(venv_backend="none", tags=["checks"])
def docs(session: nox.Session) -> None:
    """Build the documentation into ``site``, which git ignores; a warning is an error. Needs no torch."""
    check(session, CHECKS, ["mkdocs", "build", "--strict", "--clean", "--site-dir", "site"])


@nox.session(venv_backend="none", default=False)
def smoke(session: nox.Session) -> None:
    """Test what needs no ranks, the documentation, and one model on ranks: a few minutes."""
    requirements = [f"{CORE}[testing]", *SNIPPETS, *(str(pack.folder) for pack in PACKS)]
    places = [CORE, ROOT / "tests", ROOT / "docs", ROOT / "README.md", ROOT / "tools", *(p.folder for p in PACKS)]
    workspace = [str(ROOT / "tests" / f"test_{name}.py") for name in ("docs", "facts", "matrix", "environments")]
    # The tests of the kit and its pool start processes of their own.
    alone = ["-p", "without_ranks", "--without-ranks", f"--ignore={CORE / 'tests' / 'testing'}", *workspace]
    suites = [
        Suite(session, NEWEST, part, tests, requirements, places, alone=False, options=options)
        for part, tests, options in (
            ("without-ranks", CORE / "tests", alone),
            ("on-ranks", CORE / "tests" / "nn" / "test_region.py", []),
        )
    ]
    if failed := [suite.name for suite in suites if not suite.passes()]:
        session.error(f"failed: {', '.join(failed)}")


@nox.session(venv_backend="none", tags=["tests"])
def core(session: nox.Session) -> None:
    """Test the core without transformers; arguments go to pytest."""
    suite = Suite(session, Environment("core", (TORCH,)), "shardcore", CORE / "tests", [f"{CORE}[testing]"], [CORE])
    suite.run()


def add_python(version: str) -> None:
    """Make the session that tests the core with another Python."""

    def test(session: nox.Session) -> None:
        if (python := find_python(version)) is None:
            session.skip(f"this machine has no Python {version}; install it, or name it by pyenv")
        environment = Environment("core", (TORCH,), python=python)
        against = f"Python {version}"
        Suite(session, environment, "shardcore", CORE / "tests", [f"{CORE}[testing]"], [CORE], against=against).run()

    test.__doc__ = f"Test the core with Python {version}, where this machine has it."
    nox.session(venv_backend="none", name=f"core-python-{version}", tags=["pythons"], default=False)(test)


for _version in PYTHONS:
    if _version != f"{sys.version_info.major}.{sys.version_info.minor}":
        add_python(_version)


def add_cell(cell: Cell) -> None:
    """Make the sessions of one cell of the matrix: its own, and those with less or more of the conformance kit."""
    own = "every size" if cell.whole else "sizes 1 and 2"
    newest = cell.tags[0] == "newest"
    quick = ["quick"] if newest and not cell.whole else []
    _add_session(cell, cell.name, own, tags=[*cell.tags, *quick])
    if newest and cell.whole:
        _add_session(cell, f"quick-{cell.name}", "sizes 1 and 2", tags=["quick"])
    if newest or cell.whole:
        _add_session(cell, f"whole-{cell.name}", "every case", tags=["matrix"])


def _add_session(cell: Cell, name: str, kit: str, *, tags: list[str]) -> None:
    def test(session: nox.Session) -> None:
        against = f"{cell.library} {cell.release}"
        suite_of(session, cell.pack, cell.environment, against, kit=kit, options=cell.options).run()

    test.__doc__ = f"Test {cell.pack.name} against {cell.library} {cell.release}: {kit}."
    nox.session(venv_backend="none", name=name, tags=tags, default=False)(test)
    ENVIRONMENT_OF[name] = cell.environment.name


CELLS = cells_of(PACKS, TORCH)
for _cell in CELLS:
    add_cell(_cell)


@nox.session(venv_backend="none", tags=["tests"])
def together(session: nox.Session) -> None:
    """Test all packs in one environment, the documentation and the examples."""
    requirements = [f"{CORE}[testing]", *SNIPPETS, *(str(pack.folder) for pack in PACKS)]
    names = ("tests", "docs", "examples", "tools", "noxfile.py", ".ci", ".github", ".pre-commit-config.yaml")
    places = [CORE, *(ROOT / name for name in names), *ROOT.glob("*.md"), *(pack.folder for pack in PACKS)]
    own = [f"--ignore={ROOT / 'tests' / 'clients'}"]
    Suite(session, WHOLE, "together", ROOT / "tests", requirements, places, alone=False, options=own).run()


def add_clients(stack: str, environment: Environment) -> None:
    """Make the session that tests the integrations with one stack of the software that trains models."""

    def test(session: nox.Session) -> None:
        packs = [pack.folder for pack in PACKS if pack.is_tested_with(environment.pins)]
        # Some run what the documentation shows, and examples.
        shown = [ROOT / "docs", ROOT / "examples", ROOT / "tests" / "test_docs.py"]
        places = [CORE / "src", ROOT / "tests" / "clients", *shown, *(folder / "src" for folder in packs)]
        requirements = [f"{CORE}[testing]", *map(str, packs)]
        tests = ROOT / "tests" / "clients"
        Suite(session, environment, "clients", tests, requirements, places, against=stack, alone=False).run()

    test.__doc__ = f"Test Trainer, Accelerate, PEFT and others, the {stack} releases, with the packs for them."
    tags = ["matrix", "clients", *(["tests"] if stack == "newest" else [])]
    nox.session(venv_backend="none", name=f"clients-{stack}", tags=tags, default=False)(test)
    ENVIRONMENT_OF[f"clients-{stack}"] = environment.name


for _stack, _environment in CLIENTS.items():
    add_clients(_stack, _environment)


@nox.session(venv_backend="none", tags=["matrix"], default=False)
def minimums(session: nox.Session) -> None:
    """Test core and packs (sizes 1 and 2) with the lowest torch and transformers that their metadata allows."""
    own = nox.project.load_toml(CORE / "pyproject.toml")["project"]["dependencies"]

    def environment(pack: Pack | None = None) -> Environment:
        required = own if pack is None else [*own, *pack.dependencies]
        floors = () if pack is None else tuple(sorted(lowest(required, library) for library in newest_of([pack])))
        named = (floor.replace("==", "-") for floor in floors)
        return Environment("-".join(["minimums", *named]), (lowest(required, "torch"),), floors)

    core = Suite(session, environment(), "shardcore", CORE / "tests", [f"{CORE}[testing]"], [CORE], against="minimums")
    packs = [suite_of(session, pack, environment(pack), "minimums", kit="sizes 1 and 2") for pack in PACKS]
    failed = [suite.name for suite in (core, *packs) if not suite.passes()]
    if failed:
        session.error(f"failed: {', '.join(failed)}")


@nox.session(venv_backend="none", default=False)
def fuzz(session: nox.Session) -> None:
    """Search for configurations that differ from the unsharded model: nox -s fuzz -- --draws 2000."""
    python = with_every_library(session)
    session.run(str(python), str(ROOT / "tests" / "fuzz" / "search.py"), *session.posargs, env=ENV, external=True)


@nox.session(venv_backend="none", default=False)
def coverage(session: nox.Session) -> None:
    """Count the lines of the core that its tests run, on ranks too; arguments go to pytest.

    What a process had counted is lost if it is killed, as ranks that hang are.
    """
    python = COVERAGE.make(ENVIRONMENTS, functools.partial(pip, session))
    pip(session, python, "install", *COVERAGE.torch, *COVERAGE.pins, "--editable", f"{CORE}[testing]")

    def run(*arguments: str) -> None:
        session.run(str(python), "-m", "coverage", *arguments, env=ENV, external=True)

    failure = None
    run("erase")
    try:
        run("run", "-m", "pytest", *(session.posargs or [str(CORE / "tests")]))
    except CommandFailed as error:  # what ran was counted all the same
        failure = error
    run("combine", "--quiet")
    run("html", "--quiet")
    run("report", "--skip-covered", "--sort=cover")
    if failure is not None:
        session.error(str(failure))


@nox.session(venv_backend="none", default=False)
def mutations(session: nox.Session) -> None:
    """Put recorded mistakes back, one by one, and see whether a test notices: nox -s mutations -- --only NAME."""
    python = with_every_library(session)
    session.run(str(python), str(ROOT / "tools" / "mutations.py"), *session.posargs, env=ENV, external=True)


@nox.session(venv_backend="none", default=False)
def capabilities(session: nox.Session) -> None:
    """Run the conformance kit (sizes 1 and 2) with the kernels of each kind of processor that this machine has."""
    failed = []
    for capability in capabilities_here(Path("/proc/cpuinfo")):
        for pack in PACKS:
            suite = suite_of(
                session,
                pack,
                NEWEST,
                capability,
                kit="sizes 1 and 2",
                options=["-k", "test_conformance"],
                env={"ATEN_CPU_CAPABILITY": capability},
            )
            suite.result += f"-{capability}"
            failed += [] if suite.passes() else [suite.result]
    if failed:
        session.error(f"failed: {', '.join(failed)}")


@nox.session(venv_backend="none", default=False)
def parallel(session: nox.Session) -> None:
    """Run all sessions of some tags, two at a time where their environments differ: nox -s parallel -- matrix.

    Without tags these are tests and checks, as in CI. Tests wait for each other's ranks much of the time, so this takes
    less than one after another, on two cores too.
    """
    tags = session.posargs or ["tests", "checks"]
    if said := lacking(ENVIRONMENTS):
        session.error(said)
    command = [sys.executable, "-m", "nox", "--noxfile", str(ROOT / "noxfile.py")]
    listed = subprocess.run(
        [*command, "--list", "--json", "-t", *tags], check=True, capture_output=True, text=True, cwd=ROOT
    )
    groups = lanes.group((found["session"] for found in json.loads(listed.stdout)), ENVIRONMENT_OF)
    failed = lanes.run(groups, [*command, "-s"], lanes=2)
    RESULTS.refresh()
    print(RESULTS.table(), RESULTS.totals(), sep="\n")
    if failed:
        session.error(f"failed: what begins with {', '.join(failed)}; the table above says which")


@nox.session(venv_backend="none", default=False)
def table(session: nox.Session) -> None:
    """Print the results there are."""
    print(RESULTS.table(), RESULTS.totals(), sep="\n")


@nox.session(venv_backend="none", default=False)
def forget(session: nox.Session) -> None:
    """Remove the results there are, so that every session runs again."""
    shutil.rmtree(RESULTS.folder, ignore_errors=True)


@nox.session(default=False)
def demo(session: nox.Session) -> None:
    """Train a small Llama on two ranks."""
    session.install(TORCH)
    session.install(*NEWEST.pins, str(CORE), *(str(pack.folder) for pack in PACKS if pack.name == "shard-llama"))
    session.run("torchrun", "--standalone", "--nproc-per-node", "2", "examples/train_llama.py", env=ENV)


@nox.session(venv_backend="none", default=False)
def eight(session: nox.Session) -> None:
    """Train with pipelines, tensor parallelism and replicas at once, on eight ranks."""
    python = with_every_library(session)
    arguments = session.posargs or [str(ROOT / "tests" / "eight_ranks.py")]
    session.run(str(python), "-m", "pytest", "-q", *arguments, env=ENV, external=True)


@nox.session(venv_backend="none", default=False)
def resume(session: nox.Session) -> None:
    """Kill a fine-tuning at random, let it go on, on two meshes, and compare the curves: nox -s resume -- --seed 1."""
    python = with_every_library(session)
    session.run(str(python), str(ROOT / "tools" / "resume.py"), *session.posargs, env=ENV, external=True)
