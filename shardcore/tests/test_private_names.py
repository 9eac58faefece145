"""What shardcore uses of torch and transformers without a public path is in a table, and the installed torch has it."""

from __future__ import annotations

import ast
import importlib
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from packages import EVERY, files_of, root_of
from packaging.version import Version

import shardcore
from shardcore import _private
from shardcore._private import CORE, DATA_PARALLEL, FUSED, SAVING, TORCH, PrivateName
from shardcore.errors import NotSupportedError
from shardcore_cli.doctor import examine
from shardcore_planner import _private as planner
from shardcore_testing import _private as kit

ROOT = Path(shardcore.__file__).parent
HERE = Version(torch.__version__)

#: What is used of torch.
ROWS = (*TORCH.names, *planner.TORCH.names, *kit.TORCH.names)

#: Private names of Python itself, and marks that shardcore sets on objects of others.
OTHERS = {"_current_frames", "_exit", "_metadata", "_registry", "_replace", "_weight_conversions", "_written_down"}


def sources() -> Iterator[tuple[str, ast.Module]]:
    for name, file in files_of(*EVERY):
        yield name, ast.parse(file.read_text())


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names(tree: ast.AST) -> Iterator[str]:
    """Yield the names of what a class of the source defines, or sets on its instances."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from (inner.name for inner in node.body if isinstance(inner, ast.FunctionDef | ast.ClassDef))
            fields = [inner for inner in node.body if isinstance(inner, ast.Assign | ast.AnnAssign)]
            yield from (name.id for field in fields for name in ast.walk(field) if isinstance(name, ast.Name))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            yield from [node.attr] if node.value.id in ("self", "cls") else []


def used(tree: ast.AST) -> Iterator[str]:
    """Yield private names of others: attributes, imports, and texts given to ``getattr`` and its like."""
    ours = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shardcore")
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (part for alias in node.names for part in alias.name.split(".") if is_private(part))
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("shardcore"):
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (part for path in paths for part in path.split(".") if is_private(part))
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            yield from [] if isinstance(node.value, ast.Name) and node.value.id in ours else [node.attr]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
            name = node.args[1]
            if node.func.id in ("getattr", "hasattr", "setattr", "delattr") and isinstance(name, ast.Constant):
                yield from [name.value] if is_private(name.value) else []


def unlisted(file: str, tree: ast.Module, own: set[str], listed: set[str]) -> list[str]:
    return [f"{file}: {name}" for name in dict.fromkeys(used(tree)) if name not in own | listed | OTHERS]


def listed_names() -> set[str]:
    # Read, not imported: the core's tests run without transformers.
    paths = [row.path for row in ROWS]
    tables = [root_of("shardcore_transformers") / "_private.py"]
    texts = [n.value for f in tables for n in ast.walk(ast.parse(f.read_text())) if isinstance(n, ast.Constant)]
    return {part for text in (*paths, *map(str, texts)) for part in text.split(".") if is_private(part)}


def test_every_private_name_in_the_source_is_in_a_table():
    own = {name for _, tree in sources() for name in own_names(tree)}
    assert [found for file, tree in sources() for found in unlisted(file, tree, own, listed_names())] == []


@pytest.mark.parametrize(
    "text",
    [
        "import torch._inductor",
        "from torch.nn import _reduction",
        "from torch._prims import sum",
        "torch._C._get_tracing_state()",
        "getattr(tensor, '_cdata', None)",
        "parameter._grad_fn",
    ],
)
def test_a_name_outside_of_the_tables_is_found(text):
    assert unlisted("x.py", ast.parse(text), set(), listed_names())


def test_every_name_in_the_table_is_used():
    text = "\n".join(path.read_text() for _, path in files_of(*EVERY) if path.name != "_private.py")
    for row in ROWS:
        if row.name == "_StridedShardNotDecodableError":
            continue  # a sign of what that release can do
        assert re.search(rf"\b{row.name}\b", text), row.path


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.path)
def test_the_installed_torch_has_it(row: PrivateName):
    due = not row.since or Version(row.since) <= HERE
    assert row.is_there() == due, _private.complaint([row])


def test_the_tested_range_is_that_of_the_requirements():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert f"torch>={_private.TESTED[0]}" in project["dependencies"]
    assert Version(_private.TESTED[0]) <= HERE
    assert Version(f"{HERE.major}.{HERE.minor}") <= Version(_private.TESTED[1])


GONE = [
    ("torch.distributed.tensor._dtensor_spec.DTensorSpec", CORE),
    ("torch.distributed.fsdp.FSDPModule._get_fsdp_state", DATA_PARALLEL),
    ("torch.distributed._state_dict_utils._distribute_tensors", FUSED),
    ("torch.distributed.distributed_c10d._get_default_store", SAVING),
]


@pytest.mark.parametrize(("path", "feature"), GONE)
def test_a_name_that_is_gone_is_named(monkeypatch, path, feature):
    lacking = {row.path: row.feature for row in _private.missing()}  # the lowest torch lacks what fused linears need
    if feature in lacking.values():
        pytest.skip(f"this torch has no {', '.join(lacking)} to begin with")
    _private.require(feature)
    monkeypatch.delattr(path)
    with pytest.raises(NotSupportedError) as caught:
        _private.require(feature)
    said = str(caught.value)
    assert said.startswith(f"torch {torch.__version__} has no {path}")
    assert said.endswith(". shardcore was tested with torch 2.11 to 2.14; install a release of that range")
    gone = {row.path for row in _private.missing()} - lacking.keys()
    assert gone == {path}
    _private.require(SAVING if feature != SAVING else DATA_PARALLEL)


def test_a_name_of_the_kit_that_is_gone_is_named(monkeypatch):
    kit.TORCH.require()
    monkeypatch.delattr(path := "torch.distributed.tensor._collective_utils.MeshTopoInfo")
    with pytest.raises(NotSupportedError, match=rf"has no {re.escape(path)}: a private name, needed by shardcore_test"):
        kit.TORCH.require()
    _private.require(SAVING)


def test_attributes_of_instances_are_looked_for(monkeypatch):
    monkeypatch.setattr("torch.nn.Module.__init__", lambda self: None)
    gone = [row.name for row in _private.missing(CORE)]
    assert gone == ["_parameters", "_buffers", "_modules", "_load_state_dict_pre_hooks"]
    assert "_parameters (and 3 more): a private name" in _private.complaint(_private.missing(CORE))


def test_a_name_that_is_set_somewhere_else_is_noticed(monkeypatch):
    (row,) = [row for row in TORCH.names if row.name == "_module_info"]
    assert row.is_there()
    monkeypatch.setattr("torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.__init__", lambda self: None)
    assert not row.is_there()


@pytest.mark.parametrize(
    "path",
    ["torch.distributed.tensor._dtensor_spec.DTensorSpec", "torch.distributed._functional_collectives.all_reduce"],
)
def test_an_import_names_what_is_gone(monkeypatch, path):
    importlib.import_module("shardcore._torch")
    monkeypatch.delattr(path)
    monkeypatch.delitem(sys.modules, "shardcore._torch")
    with pytest.raises(NotSupportedError, match=rf"has no {re.escape(path)}: a private name, needed by everything"):
        importlib.import_module("shardcore._torch")


def test_the_doctor_reports_it(monkeypatch):
    def finding() -> dict[str, str]:
        (found,) = [check for check in examine()["checks"] if check["what"] == "names of torch"]
        return found

    assert finding()["state"] == "works"
    monkeypatch.delattr("torch.distributed.fsdp.FSDPModule._get_fsdp_state")
    assert finding()["state"] == "fails"
    assert "has no torch.distributed.fsdp.FSDPModule._get_fsdp_state: a private name" in finding()["why"]


def test_a_module_that_nobody_has_imported_is_there():
    assert "wsgiref.validate" not in sys.modules
    assert PrivateName("wsgiref.validate", "nothing").is_there()
    assert not PrivateName("wsgiref.nothing", "nothing").is_there()
