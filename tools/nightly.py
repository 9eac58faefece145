"""The sessions that are only in the nightly run, or in none: every release, every mistake, searches, cards.

The noxfile imports this module, which makes them sessions of its own.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

import nox
from newest_release import table
from nox.command import CommandFailed

from cells import Cell, Pack, cells_of, floors_of, newest_of  # from tools/
from environments import Environment, capabilities_here, find_python
from suites import (
    CLIENTS,
    CORE,
    ENV,
    ENVIRONMENT_OF,
    ENVIRONMENTS,
    NEWEST,
    OWN,
    PACKS,
    RESULTS,
    SOURCES,
    SOURCES_AROUND,
    TORCH,
    Part,
    Suite,
    check,
    core_suite,
    everything,
    pip,
    suite_of,
    with_every_library,
)

ROOT = Path(__file__).parents[1]
COVERAGE = Environment("coverage", (TORCH,), ("coverage==7.15.0",))
PYTHONS = ("3.11", "3.12", "3.13")


def add_python(version: str) -> None:
    """Make the session that tests the core with another Python, as the quick run does."""

    def test(session: nox.Session) -> None:
        if (python := find_python(version)) is None:
            session.skip(f"this machine has no Python {version}; install it, or name it by pyenv")
        environment = Environment("core", (TORCH,), python=python)
        against = f"Python {version}"
        core_suite(session, environment, "--quick", against=against).run()

    test.__doc__ = f"Test the core with Python {version}, where this machine has it."
    nox.session(venv_backend="none", name=f"core-python-{version}", tags=["pythons"], default=False)(test)


for _version in PYTHONS:
    if _version != f"{sys.version_info.major}.{sys.version_info.minor}":
        add_python(_version)


def add_cell(cell: Cell) -> None:
    """Make the session of one cell of the matrix."""

    def test(session: nox.Session) -> None:
        against = f"{cell.library} {cell.release}"
        suite_of(session, cell.packs, cell.environment, against, whole=cell.whole, options=cell.options).run()

    packs = cell.packs[0].name if cell.whole else f"{len(cell.packs)} packs"
    test.__doc__ = f"Test {packs} against {cell.library} {cell.release}."
    tags = ["tests", cell.packs[0].name] if cell.whole else ["matrix"]
    nox.session(venv_backend="none", name=cell.name, tags=tags, default=False)(test)
    ENVIRONMENT_OF[cell.name] = cell.environment.name


for _cell in cells_of(PACKS, TORCH):
    add_cell(_cell)


def add_clients(stack: str, environment: Environment) -> None:
    """Make the session that tests the integrations with one stack of the software that trains models."""

    def test(session: nox.Session) -> None:
        packs = [pack.folder for pack in PACKS if pack.is_tested_with(environment.pins)]
        # Some run what the documentation shows, and examples.
        shown = [ROOT / "docs", ROOT / "examples", ROOT / "tests" / "test_docs.py"]
        places = [
            CORE / "src",
            *SOURCES_AROUND,
            ROOT / "tests" / "clients",
            *shown,
            *(folder / "src" for folder in packs),
        ]
        requirements = [*OWN, *map(str, packs)]
        tests = ROOT / "tests" / "clients"
        part = Part("clients", tests, requirements, places)
        Suite(session, environment, [part], against=stack, alone=False).run()

    test.__doc__ = f"Test Trainer, Accelerate, PEFT and others, the {stack} releases, with the packs for them."
    tags = ["clients", "tests" if stack == "newest" else "matrix"]
    nox.session(venv_backend="none", name=f"clients-{stack}", tags=tags, default=False)(test)
    ENVIRONMENT_OF[f"clients-{stack}"] = environment.name


for _stack, _environment in CLIENTS.items():
    add_clients(_stack, _environment)


@nox.session(venv_backend="none", tags=["matrix"], default=False)
def minimums(session: nox.Session) -> None:
    """Test the core and packs, as the quick run does, with the lowest torch and transformers that are allowed."""
    own = nox.project.load_toml(CORE / "pyproject.toml")["project"]["dependencies"]

    core = floors_of(own)
    alike: dict[Environment, list[Pack]] = {}
    for pack in PACKS:
        alike.setdefault(floors_of([*own, *pack.dependencies], newest_of([pack])), []).append(pack)
    suites = [core_suite(session, core, "--quick", against=core.name, name=f"{session.name}-shardcore")]
    for floors, packs in alike.items():
        suites.append(suite_of(session, packs, floors, floors.name, result=f"{session.name}-{floors.name}"))
    if failed := [suite.result for suite in suites if not suite.passes()]:
        session.error(f"failed: {', '.join(failed)}")


@nox.session(venv_backend="none", tags=["searches"], default=False)
def fuzz(session: nox.Session) -> None:
    """Search for configurations that differ from the unsharded model: nox -s fuzz -- --draws 2000."""
    _with_every_library(session, str(ROOT / "tests" / "fuzz" / "search.py"))


@nox.session(venv_backend="none", tags=["searches"], default=False)
def eight(session: nox.Session) -> None:
    """Train with pipelines, tensor parallelism and replicas at once, on eight ranks."""
    _with_every_library(session, "-m", "pytest", "-q", str(ROOT / "tests" / "eight_ranks.py"))


@nox.session(venv_backend="none", tags=["searches"], default=False)
def resume(session: nox.Session) -> None:
    """Kill a fine-tuning at random, let it go on, on two meshes, and compare the curves: nox -s resume -- --seed 1."""
    _with_every_library(session, str(ROOT / "tools" / "resume.py"))


@nox.session(venv_backend="none", default=False)
def gpu(session: nox.Session) -> None:
    """Run the conformance kit on the cards of this machine, in parts that are resumed: nox -s gpu -- kit-1."""
    session.run(str(everything(session)), "tools/gpu.py", *session.posargs, env=ENV, external=True)


@nox.session(venv_backend="none", default=False)
def census(session: nox.Session) -> None:
    """Measure classes that docs/census.md lacks, and write it: nox -s census -- --minutes 30; -- timm for timm's."""
    of_timm = session.posargs[:1] == ["timm"]
    tool = "tools/census_timm.py" if of_timm else "tools/census.py"
    python = (with_every_library if of_timm else everything)(session)
    session.run(str(python), tool, *session.posargs[of_timm:], env=ENV, external=True)


@nox.session(venv_backend="none", name="newest-release", default=False)
def newest_release(session: nox.Session) -> None:
    """Say what the newest release changes for all packs: nox -s newest-release -- transformers [RELEASE]."""
    library, *given = session.posargs or ["transformers"]
    session.posargs.clear()  # a suite would hand them to pytest
    if library != "transformers":
        session.error(f"{library}: wanted transformers; for other libraries add the release to the matrix of a pack")
    folder = ROOT / ".nox" / "newest-release"
    folder.mkdir(parents=True, exist_ok=True)
    python = Environment("newest-transformers", (TORCH,)).make(ENVIRONMENTS, functools.partial(pip, session))
    packs = [pack for pack in PACKS if library in pack.matrix]
    own = [*OWN, *(str(pack.folder) for pack in packs)]
    wanted = "==".join([library, *given[:1]])
    session.log(f"installs {wanted} and {len(packs)} packs; their quick tests and the census of new classes follow")
    pip(session, python, "install", "--upgrade", "--no-build-isolation", TORCH, wanted, *own)
    for name, interpreter in (("old", everything(session)), ("new", python)):
        session.run(str(interpreter), "tools/release_facts.py", str(folder / f"{name}.json"), env=ENV, external=True)
    old, new = (json.loads((folder / f"{name}.json").read_text()) for name in ("old", "new"))
    environment = Environment("newest-transformers", (TORCH,), (f"transformers=={new['release']}",))
    passed = suite_of(session, packs, environment, f"transformers {new['release']}").passes()
    own_results = [result for result in RESULTS.all() if result.name.startswith(session.name)]
    red = {test: why for result in own_results for test, why in result.failures.items()}
    measured = folder / "census.jsonl"
    measured.unlink(missing_ok=True)
    if names := sorted(new["classes"].keys() - old["classes"].keys()):
        written = ["--results", str(measured), "--page", str(folder / "census.md")]
        session.run(str(python), "tools/census.py", *written, "--only", *names, env=ENV, external=True)
    lines = measured.read_text().splitlines() if measured.exists() else []
    text = table(old, new, red, {found["class"]: found for found in map(json.loads, lines)})
    (folder / "table.md").write_text(text)
    print(text)
    if not passed:
        session.error(f"tests of packs fail with transformers {new['release']}: {folder / 'table.md'}")


@nox.session(venv_backend="none", default=False)
def mutations(session: nox.Session) -> None:
    """Put recorded mistakes back, one by one, and see whether a test notices: nox -s mutations -- --only NAME."""
    _with_every_library(session, str(ROOT / "tools" / "mutations.py"))


def _with_every_library(session: nox.Session, *command: str) -> None:
    """Call Python where every library is; without arguments of the session the outcome is kept."""
    if session.posargs:
        session.run(str(with_every_library(session)), *command, *session.posargs, env=ENV, external=True)
    else:
        check(session, with_every_library, ["python", *command], sources=SOURCES)


@nox.session(venv_backend="none", default=False)
def coverage(session: nox.Session) -> None:
    """Count the lines of the core that its tests run, on ranks too; arguments go to pytest.

    What a process had counted is lost if it is killed, as ranks that hang are.
    """
    python = COVERAGE.make(ENVIRONMENTS, functools.partial(pip, session))
    pip(
        session,
        python,
        "install",
        *COVERAGE.torch,
        *COVERAGE.pins,
        *(part for own in OWN for part in ("--editable", own)),
    )

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


def add_mistakes(kind: str) -> None:
    """Make the session that puts the recorded mistakes of one kind back."""

    def test(session: nox.Session) -> None:
        command = ["python", str(ROOT / "tools" / "mutations.py"), "--kind", kind]
        check(session, with_every_library, command, sources=SOURCES)

    test.__doc__ = f"Put the recorded mistakes of {kind} back, one by one."
    nox.session(venv_backend="none", name=f"mistakes-{kind}", tags=["mistakes"], default=False)(test)
    ENVIRONMENT_OF[f"mistakes-{kind}"] = CLIENTS["newest"].name


for _file in sorted((ROOT / "tests" / "mutations").glob("*.toml")):
    add_mistakes(_file.stem)


@nox.session(venv_backend="none", default=False)
def capabilities(session: nox.Session) -> None:
    """Run the conformance kit, as the quick run does, with the kernels of each kind of processor that is here."""
    failed = []
    packs = [pack for pack in PACKS if pack.is_tested_with(NEWEST.pins)]
    for capability in capabilities_here(Path("/proc/cpuinfo")):
        only, env = ["-k", "test_conformance"], {"ATEN_CPU_CAPABILITY": capability}
        name = f"{session.name}-{capability}"
        suite = suite_of(session, packs, NEWEST, capability, options=only, env=env, result=name)
        failed += [] if suite.passes() else [capability]
    if failed:
        session.error(f"failed: {', '.join(failed)}")
