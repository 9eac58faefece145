from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packages import AROUND, EVERY, files_of
from packaging.requirements import Requirement

import shardcore

HEAVY = ("torch", "transformers", "timm", "numpy")

PACKAGE = {"shardcore", "shardcore._lazy", "shardcore.errors"}
REGISTRY = {
    *PACKAGE,
    "shardcore.plugins",
    "shardcore.plugins.registry",
    "shardcore.plugins.isolation",
    "shardcore.plugins.loading",
    "shardcore.plugins.unserved",
    "shardcore.plugins.versions",
    "shardcore.hooks",
    "shardcore._env",
}


def loaded_by(statement: str) -> set[str]:
    """Return the modules that a fresh interpreter holds after a statement."""
    source = str(Path(shardcore.__file__).parents[1])
    path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", f"{statement}\nimport sys\nprint(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": path},
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("statement", "own"),
    [
        ("import shardcore", PACKAGE),
        ("import shardcore.hooks", {*PACKAGE, "shardcore.hooks"}),
        ("from shardcore import PolicySpec, hookimpl", {*PACKAGE, "shardcore.hooks"}),
        ("import shardcore.errors", PACKAGE),
        ("import shardcore._env", {*PACKAGE, "shardcore._env"}),
        (
            "import shardcore.plugins.registry",
            REGISTRY,
        ),
        (
            "from shardcore.plugins.registry import Registry; Registry.discover([])",
            REGISTRY,
        ),
    ],
)
def test_light_modules_stay_light(statement: str, own: set[str]) -> None:
    loaded = loaded_by(statement)
    assert loaded.isdisjoint(HEAVY)
    assert {name for name in loaded if name.partition(".")[0] == "shardcore"} == own


def test_hooks_import_no_metadata_reader() -> None:
    """Every plugin pays for what hooks import, so that the registry's tools are not among it."""
    assert loaded_by("import shardcore.hooks").isdisjoint({"importlib_metadata", "packaging", "email"})


def test_the_check_can_fail() -> None:
    assert "torch" in loaded_by("import shardcore, torch")
    assert "shardcore.plugins.registry" in loaded_by("import shardcore\nshardcore.Registry")


FOREIGN = {
    "transformers",
    "timm",
    "bitsandbytes",
    "torchao",
    "accelerate",
    "peft",
    "huggingface_hub",
    "trl",
    "sentence_transformers",
    "datasets",
}
#: The clients that know them.
KNOWING = {"shardcore_transformers", "shardcore_quantized", "shardcore_peft", "shardcore_trainer"}

#: What each room may import of shardcore: arrows go down only.
ROOMS = {
    "comm": {"errors", "_private", "_torch"},
    "transfer": {"comm", "_private", "_torch"},
    "mesh": {"transfer", "comm", "errors", "_torch"},
    "config": {"mesh", "transfer", "errors"},
    "nn": {"comm", "transfer", "mesh", "errors", "_private", "_torch"},
    "plan": {"nn", "comm", "config", "mesh", "errors"},
    "styles": {"policy", "plan", "nn", "config", "errors"},
    "compile": {"styles", "policy", "plan", "nn", "config", "mesh", "transfer", "errors", "_env"},
    "plugins": {"hooks", "policy", "errors", "_env"},
    "agree": {"plan", "comm", "mesh", "errors"},
    "apply": {
        "comm",
        "clients",
        "plugins",
        "agree",
        "compile",
        "policy",
        "plan",
        "nn",
        "config",
        "mesh",
        "errors",
        "_env",
    },
    "weights": {"plan", "comm", "mesh", "errors", "_progress", "_private", "_torch"},
    "checkpoint": {"agree", "nn", "comm", "mesh", "errors", "_private", "_progress"},
    "fsdp": {"agree", "policy", "plan", "nn", "config", "comm", "transfer", "mesh", "errors", "_private", "_torch"},
    "pipeline": {"fsdp", "agree", "plan", "nn", "config", "comm", "transfer", "mesh", "errors", "_torch"},
}


@functools.cache
def trees() -> dict[str, ast.AST]:
    """Return every file of the core, by its path below the core's folder."""
    root = Path(shardcore.__file__).parent
    return {file.relative_to(root).as_posix(): ast.parse(file.read_text()) for file in sorted(root.rglob("*.py"))}


@functools.cache
def imports() -> list[tuple[str, str]]:
    """Return (module, imported module) for every import statement of the core, wherever it stands."""
    found = []
    for file, tree in trees().items():
        name = ".".join(("shardcore", *Path(file).with_suffix("").parts))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found += [(name, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                found.append((name, node.module or ""))
    return found


def metadata_of(package: str) -> Path:
    """Return the file with a distribution's metadata, in the workspace: what is installed may be a copy."""
    workspace, name = Path(__file__).parents[2], package.replace("_", "-")
    (file,) = (workspace / room / name / "pyproject.toml" for room in (".", "clients", "kit")
               if (workspace / room / name / "pyproject.toml").is_file())  # fmt: skip
    return file


def imported_by(package: str) -> set[str]:
    """Return the modules that a package imports, wherever it does."""
    nodes = [node for _, file in files_of(package) for node in ast.walk(ast.parse(file.read_text()))]
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return plain | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}


@pytest.mark.parametrize("package", EVERY)
def test_what_is_imported_is_required(package: str) -> None:
    """What another requirement happens to bring today may be gone with its next release."""
    below = {package, *AROUND.get(package, ())}  # released together
    files = [metadata_of(each) for each in below]
    lines = [line for file in files for line in tomllib.loads(file.read_text())["project"]["dependencies"]]
    required = {Requirement(line).name.replace("-", "_") for line in lines}
    used = {imported.partition(".")[0] for imported in imported_by(package)} - sys.stdlib_module_names - FOREIGN
    assert used - required <= {"shardcore", package}


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_arrows_go_down(room: str) -> None:
    inside = [(n, i) for n, i in imports() if n.startswith(f"shardcore.{room}.") and i.startswith("shardcore")]
    allowed = {room, *ROOMS[room]}
    upward = [(name, used) for name, used in inside if used.split(".")[1:2] and used.split(".")[1] not in allowed]
    assert inside
    assert not upward


@pytest.mark.parametrize("package", EVERY)
def test_distributions_lean_on_those_below(package: str) -> None:
    """The core leans on none; the others on what `packages.AROUND` says, which their metadata say too."""
    used = {imported.partition(".")[0] for imported in imported_by(package)}
    assert used & set(EVERY) <= {package, *AROUND.get(package, ())}
    assert not used & FOREIGN or package in KNOWING


#: Names of libraries and of families of models: what is about them is in clients and packs. "Ctrl" is none.
LIBRARIES = re.compile(r"transformers|timm|peft|accelerate|\btrl\b|llama|whisper", re.IGNORECASE)
#: Of docstrings: blocks of code, and code between words. What stands there is an example.
EXAMPLES = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


def mentions(source: str) -> set[str]:
    """Return the lines of a module that name a library, examples in docstrings left out."""
    tree, lines = ast.parse(source), source.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) or ast.get_docstring(node) is None:
            continue
        docstring, whole = node.body[0], isinstance(node, ast.Module)
        first, last = docstring.lineno - 1, docstring.end_lineno or docstring.lineno
        said = EXAMPLES.sub(lambda found: "\n" * found[0].count("\n"), "\n".join(lines[first:last])).split("\n")
        # Of a module's, code is what is indented: it has no sections.
        lines[first:last] = ["" if whole and line.startswith("    ") else line for line in said]
    return {line.strip() for line in lines if LIBRARIES.search(line)}


def test_the_core_knows_no_library() -> None:
    root = Path(shardcore.__file__).parent
    found = {file.relative_to(root).as_posix(): mentions(file.read_text()) for file in sorted(root.rglob("*.py"))}
    assert len(found) > 150
    assert {file: lines for file, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import transformers", True),
        ('kind = "PeftModel"', True),
        ("x = 1  # as timm does", True),
        ('def f():\n    """Do what TRL does."""', True),
        ('"""About Whisper."""', True),
        ('"""An example:\n\n    "LlamaMlp": []\n"""', False),
        ('def f():\n    """Shard.\n\n    ```python\n    LlamaModel(config)\n    ```\n    """', False),
        ('def f():\n    """Give a name such as `llama`; Ctrl-C ends it."""', False),
    ],
)
def test_a_mention_is_found(source: str, found: bool) -> None:
    assert bool(mentions(source)) is found


INTERNALS = {"_local_tensor", "_spec"}


def touches(node: ast.AST) -> bool:
    """Tell whether code reads what a DTensor keeps to itself, or wraps a part without its constructor."""
    if isinstance(node, ast.Attribute):
        of = node.value.id if isinstance(node.value, ast.Name) else ""
        return node.attr in INTERNALS or (of, node.attr) == ("DTensor", "__new__")
    return isinstance(node, ast.Constant) and node.value in INTERNALS


def test_one_module_touches_the_internals_of_dtensors() -> None:
    """So say `shardcore.comm.dtensor_params` and docs/adr/0002-regions.md: it is what a new torch can break."""
    assert {file for file, tree in trees().items() if any(map(touches, ast.walk(tree)))} == {"comm/dtensor_params.py"}


def kinds_in(tree: ast.AST) -> set[str]:
    """Return the kinds of steps that a file declares."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return {cls.name for cls in classes if any(isinstance(base, ast.Name) and base.id == "Step" for base in cls.bases)}


def asked(tree: ast.AST, kinds: set[str]) -> Iterator[str]:
    """Yield each of ``kinds`` that code names otherwise than by making one."""
    made = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        if name in kinds and id(node) not in made:
            yield name


def test_only_its_own_file_asks_for_a_kind_of_step() -> None:
    """What others want to know, a step says itself: no list of kinds is there to be forgotten."""
    homes = {file: kinds_in(tree) for file, tree in trees().items()}
    kinds = set().union(*homes.values())
    assert {"EnterRegion", "ShardSequence", "Swap"} <= kinds
    found = {file: set(asked(tree, kinds - homes[file])) for file, tree in trees().items()}
    phases = {file for file, tree in trees().items() if list(asked(tree, {"Phase"}))}
    assert {file: names for file, names in found.items() if names} == {}
    # When a step is carried out is for the order of the plan alone.
    assert phases <= {"plan/steps/base.py", *(file for file, declared in homes.items() if declared)}
    makers = {file.partition("/")[0] for file, tree in trees().items() if list(imported_kinds(tree, kinds))}
    assert makers <= {"plan", "styles", "compile", "policy.py"}


def imported_kinds(tree: ast.AST, kinds: set[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names if alias.name in kinds)


@pytest.mark.parametrize(
    "text",
    [
        "any(isinstance(step, Swap) for step in plan.steps)",
        "{steps.Swap: 1}[type(step)]",
        "found: list[Swap] = []",
        "def of(step: Swap): pass",
    ],
)
def test_asking_for_a_kind_is_found(text: str) -> None:
    assert list(asked(ast.parse(text), {"Swap"})) == ["Swap"]
    assert not list(asked(ast.parse("scope.add(Swap(path='x'))"), {"Swap"}))
