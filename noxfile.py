"""The jobs of the workspace: ``nox``, ``nox -s quick``, ``nox -s nightly``, and others by their names.

``nox`` alone is for a contributor before a commit: style, types, documentation (the tag ``checks``), and the tests that
need no ranks (``smoke``). ``nox -s quick`` is what ``.ci/run`` runs: what ``nox`` runs, as a newcomer would run it
(``newcomer``), and every mechanism and every family once, in one environment, two sessions at a time: those of the tag
``quick``. ``nox -s nightly`` is everything: all sizes, all releases, all recorded mistakes.

In the nightly run each pack is tested by itself, with its whole conformance kit, against the newest
release that its ``[tool.shardcore.matrix]`` names: a session such as ``shard-bert-transformers-5.24.0``. Every other
release is tested with all packs that name it, every mechanism and every family once: a session such as
``transformers-5.0.0`` (``-- -k shard-bert`` selects). Tags: ``tests`` (the core, each pack by itself, all packs
together, the clients), ``matrix`` (the other releases), ``mistakes`` (the recorded ones, a session for each kind),
``searches`` (random configurations, trainings that are killed, eight ranks), ``pythons`` (the core with each other
Python that is here), and the name of each pack. One environment for each release serves all of them, and those of one
torch share its files.

Results are kept in ``.nox/results``, with a table. A session that passed, or a pack that passed in it, is not run again
as long as what it tests is unchanged, so a run that was interrupted is resumed by the same command, and a change of one
pack costs no other one; ``nox -s forget`` starts anew. ``nox -s capabilities`` runs the kits, as the quick run does,
with the kernels of every kind of processor of the machine.
"""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT / "tools"))

import lanes  # noqa: E402
from environments import Environment  # noqa: E402
from results import Results  # noqa: E402  # from tools/
from room import lacking  # noqa: E402
from suites import (  # noqa: E402
    AROUND,
    CORE,
    ENV,
    ENVIRONMENT_OF,
    ENVIRONMENTS,
    EVERYTHING,
    NEWEST,
    OWN,
    PACKS,
    RESULTS,
    TESTS_AROUND,
    TORCH,
    Part,
    Suite,
    check,
    core_suite,
    everything,
    pip,
    small_first,
)

# Ruff formats the signatures in the documentation too.
TOOLS = ("ruff==0.17.5", "mypy==2.4.1")
DOCS = ("mkdocs==1.6.1", "mkdocs-material==9.8.1", "mkdocstrings==1.0.8", "mkdocstrings-python==2.0.11")
# The checks share it; it has no torch: mypy reads that of the newest releases.
CHECKS = Environment("checks", (), (*TOOLS, *DOCS))
# The checks install into that of `types` too.
ENVIRONMENT_OF.update({**dict.fromkeys(("lint", "types", "docs"), CHECKS.name), "together": EVERYTHING.name})
# The core knows no library: its tests run as if none were installed.
ALONE = {"PYTHONPATH": str(ROOT / "tools" / "alone")}
# A newcomer's folder may be a long way down.
DEEP = (
    ROOT
    / ".nox"
    / "a-checkout-of-somebody-who-keeps-his-work-in-folders-with-long-names"
    / "that-are-nested"
    / "shardcore"
)


def tooled(session: nox.Session) -> Path:
    """Return the interpreter of the environment of the checks."""
    if not ENVIRONMENTS.exists():
        session.log(
            "The first run installs: tools for the checks (0.2 GB in .nox), then torch and all libraries for the tests "
            "(1.7 GB with a build of torch for CPUs). `nox` alone takes about 5 minutes then, and 3 without that."
        )
    python = CHECKS.make(ENVIRONMENTS, functools.partial(pip, session))
    pip(session, python, "install", *CHECKS.pins)
    return python


nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "virtualenv"
nox.options.sessions = ["lint", "types", "docs", "smoke"]


@nox.session(venv_backend="none", tags=["checks"])
def lint(session: nox.Session) -> None:
    """Check style and format."""
    check(session, tooled, ["ruff", "check", "."], ["ruff", "format", "--check", "."])


@nox.session(venv_backend="none", tags=["checks"])
def types(session: nox.Session) -> None:
    """Check types, against the newest releases."""
    check(session, tooled, ["mypy", "--python-executable", str(everything(session))])


@nox.session(venv_backend="none", tags=["checks"])
def docs(session: nox.Session) -> None:
    """Build the documentation into ``site``, which git ignores; a warning is an error. Needs no torch."""
    check(session, tooled, ["mkdocs", "build", "--strict", "--clean", "--site-dir", "site"])


def _ready(session: nox.Session, name: str, tests: Path, sources: list[Path], *options: str, **more: object) -> Suite:
    """Return a suite that runs where everything is installed."""
    part = Part(name, tests, [], [CORE, *AROUND, ROOT / "tools", *sources])
    result = name if name == session.name else f"{session.name}-{name}"
    return Suite(session, EVERYTHING, [part], result=result, ready=True, options=[*options], **more)  # type: ignore[arg-type]


@nox.session(venv_backend="none", default=False)
def smoke(session: nox.Session) -> None:
    """Test what needs no ranks, the documentation, and one model on ranks."""
    pages = [ROOT / "tests", ROOT / "docs", ROOT / "README.md", *(pack.folder for pack in PACKS)]
    facts, *workspace = (ROOT / "tests" / f"test_{name}.py" for name in ("facts", "docs", "matrix", "environments"))
    alone = ["-p", "without_ranks", "--without-ranks", "--quick"]
    suites = [
        _ready(session, "without-ranks", CORE / "tests", [], *TESTS_AROUND, *alone, env=ALONE),
        _ready(session, "pages", facts, pages, *alone, *map(str, workspace)),
        _ready(session, "on-ranks", CORE / "tests" / "nn" / "test_region.py", [], "--quick", env=ALONE),
    ]
    if failed := [suite.result for suite in suites if not suite.passes()]:
        session.error(f"failed: {', '.join(failed)}")


@nox.session(venv_backend="none", tags=["quick"], default=False)
def newcomer(session: nox.Session) -> None:
    """Run ``nox`` alone, as contributors are told to, in a copy of the workspace that is deep down in folders."""
    shutil.rmtree(DEEP, ignore_errors=True)
    left_out = shutil.ignore_patterns(".git", ".nox", ".venv", "site", "__pycache__", "*.egg-info", ".*_cache")
    shutil.copytree(ROOT, DEEP, ignore=left_out)
    (DEEP / ".nox").mkdir()
    (DEEP / ".nox" / ENVIRONMENTS.name).symlink_to(ENVIRONMENTS)
    there, env = Results(DEEP / ".nox" / RESULTS.folder.name), {**ENV, "TMPDIR": None}
    try:
        session.run(sys.executable, "-m", "nox", "--noxfile", str(DEEP / "noxfile.py"), env=env, external=True)
    finally:
        for result in there.all():
            RESULTS.write(result)
    shutil.rmtree(DEEP)


def add_quick(name: str, tests: Path, sources: list[Path], *options: str, **more: object) -> None:
    """Make a session of the quick run."""

    def test(session: nox.Session) -> None:
        _ready(session, name, tests, sources, "--quick", "-p", "quick", *options, **more).run()

    test.__doc__ = f"Test {name.removeprefix('quick-')}: every mechanism and every family once."
    nox.session(venv_backend="none", name=name, tags=["quick"], default=False)(test)


_packs = [pack.folder for pack in small_first(PACKS)]
_TOGETHER = (f"--ignore={ROOT / 'tests' / 'clients'}",)
_shown = [
    ROOT / name for name in ("tests", "docs", "examples", "noxfile.py", ".ci", ".github", ".pre-commit-config.yaml")
]
add_quick("quick-packs", _packs[0], _packs, *map(str, _packs[1:]))
add_quick("quick-core", CORE / "tests", [], *TESTS_AROUND, "-p", "without_ranks", "--on-ranks", env=ALONE)
add_quick("quick-together", ROOT / "tests", [*_packs, *_shown, *ROOT.glob("*.md")], *_TOGETHER)
add_quick("quick-clients", ROOT / "tests" / "clients", [*_packs, *_shown])


@nox.session(venv_backend="none", tags=["quick"], default=False)
def oldest(session: nox.Session) -> None:
    """Test plans, gradients and generation of two packs with the oldest transformers that is served."""
    packs = [pack for pack in PACKS if pack.name in ("shard-bert", "shard-llama")]
    release = f"transformers=={packs[0].matrix['transformers'][0]}"
    first, *others = (pack.folder / "tests" / "test_conformance.py" for pack in packs)
    environment = Environment(release.replace("==", "-"), (TORCH,), (release,))
    places = [CORE, *AROUND, *(pack.folder for pack in packs), ROOT / "tools"]
    options = ["--quick", "-p", "quick", "-k", "plan or gradients or generation", *map(str, others)]
    part = Part("oldest", first, [*OWN, *(str(pack.folder) for pack in packs)], places)
    Suite(session, environment, [part], alone=False, options=options).run()


@nox.session(venv_backend="none", tags=["tests"])
def core(session: nox.Session) -> None:
    """Test the core without transformers; arguments go to pytest."""
    core_suite(session, Environment("core", (TORCH,))).run()


@nox.session(venv_backend="none", tags=["tests"])
def together(session: nox.Session) -> None:
    """Test all packs in one environment, the documentation and the examples."""
    _ready(session, "together", ROOT / "tests", [*_packs, *_shown, *ROOT.glob("*.md")], *_TOGETHER).run()


@nox.session(venv_backend="none", default=False)
def quick(session: nox.Session) -> None:
    """Run what CI runs, two sessions at a time: 13 minutes, environments included, on two cores."""
    _side_by_side(session, ["quick"], needs=3e9)


@nox.session(venv_backend="none", default=False)
def nightly(session: nox.Session) -> None:
    """Run everything, two sessions at a time: some hours. What passed is not run again: a run may be resumed."""
    every = ["tests", "checks", "mistakes", "matrix", "searches", "pythons"]
    _side_by_side(session, session.posargs or every, needs=12e9)


def _side_by_side(session: nox.Session, tags: list[str], *, needs: float) -> None:
    if said := lacking(ENVIRONMENTS, needs):
        session.error(said)
    command = [sys.executable, "-m", "nox", "--noxfile", str(ROOT / "noxfile.py")]
    listed = subprocess.run(
        [*command, "--list", "--json", "-t", *tags], check=True, capture_output=True, text=True, cwd=ROOT
    )
    names = {found["session"]: set(found["tags"]) for found in json.loads(listed.stdout)}
    # In the order of the tags, whatever the order of the sessions here.
    ordered = sorted(names, key=lambda name: min(tags.index(tag) for tag in names[name] if tag in tags))
    failed = lanes.run(lanes.group(ordered, ENVIRONMENT_OF), [*command, "-s"], lanes=2)
    RESULTS.refresh()
    print(RESULTS.table(), RESULTS.slowest(10), RESULTS.totals(), sep="\n")
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
    """Train a small Llama on two ranks, beside the same training unsharded."""
    session.log(
        f"This takes about three minutes on two idle cores, a half of it pip's, which now installs {TORCH}, "
        f"{', '.join(NEWEST.pins)}, the core and shard-llama into .nox/demo: 1.2 GB with a build of torch for CPUs, "
        "a download of 0.2 GB; with one for accelerators, pip's choice on Linux by default, several times as much."
    )
    # What pip does is shown: a download of torch may take longer than everything else.
    session.install("--progress-bar", "on", TORCH, silent=False)
    own = [str(CORE), str(ROOT / "clients" / "shardcore-transformers"), str(ROOT / "packs" / "shard-llama")]
    session.install("--progress-bar", "on", *NEWEST.pins, *own, silent=False)
    session.log("Trains now; the first line comes when both ranks have imported torch, some ten seconds.")
    session.run("torchrun", "--standalone", "--nproc-per-node", "2", "examples/train_llama.py", env=ENV)


import nightly as nightly_sessions  # noqa: E402, F401  # from tools/: what is only in the nightly run
