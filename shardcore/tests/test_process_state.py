"""What the core keeps for the whole process is in docs/process.md, and nothing else is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from packages import EVERY, files_of

PAGE = Path(__file__).parents[2] / "docs" / "process.md"

#: Calls whose value never changes.
CONSTANT = {
    "Path", "TypeVar", "frozenset", "object", "re.compile", "getattr", "tuple", "map",
    "HookspecMarker", "HookimplMarker", "pluggy.HookspecMarker", "pluggy.HookimplMarker",
    "StateDictOptions", "dist.AllreduceOptions",
    "Ability", "Flow", "PrivateName", "Uses", "ALL_GATHER.find", "REDUCE_SCATTER.find", "SET_TIMEOUT.find",
    "overloads", "CLIPPED_SUMS.is_there", "STAGES.is_there", "TRACED_READS.is_there",
}  # fmt: skip
CHANGING = {
    "add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update",
}  # fmt: skip
CACHES = ("cache", "lru_cache", "once")


def state(tree: ast.Module) -> Iterator[str]:
    """Yield the names of a module that hold what changes while the process runs."""
    changed = set(_changed(tree))
    for node in tree.body:
        for name, value in _assigned(node):
            display = isinstance(value, ast.Dict | ast.List | ast.Set)
            empty = display and not (value.keys if isinstance(value, ast.Dict) else value.elts)
            call = isinstance(value, ast.Call) and ast.unparse(value.func) not in CONSTANT
            if call or empty or (name in changed and name != "__all__"):
                yield name
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            decorators = [ast.unparse(d.func if isinstance(d, ast.Call) else d) for d in node.decorator_list]
            yield from [node.name] if any(d.rpartition(".")[2] in CACHES for d in decorators) else []
        elif isinstance(node, ast.Global):
            yield from node.names
        elif isinstance(node, ast.ClassDef):
            yield from _class_state(node, tree)


def _class_state(cls: ast.ClassDef, tree: ast.Module) -> Iterator[str]:
    """Yield the class if somebody sets its attributes: ``_State.depth += 1``."""
    stored = (n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    if any(isinstance(node.value, ast.Name) and node.value.id == cls.name for node in stored):
        yield cls.name


def _assigned(node: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node, ast.Assign):
        yield from ((t.id, node.value) for t in node.targets if isinstance(t, ast.Name))
    elif isinstance(node, ast.AnnAssign) and node.value is not None and isinstance(node.target, ast.Name):
        yield node.target.id, node.value


def _changed(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load) and isinstance(node.value, ast.Name):
            yield node.value.id
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGING:
            yield from [node.func.value.id] if isinstance(node.func.value, ast.Name) else []


def patches(tree: ast.Module) -> Iterator[str]:
    """Yield the functions that register something with torch for the whole process."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            called = [n.func for n in ast.walk(node) if isinstance(n, ast.Call)]
            names = {getattr(f, "attr", getattr(f, "id", "")) for f in called}
            if names & {"register_optimizer_step_pre_hook", "register_optimizer_step_post_hook"}:
                yield node.name


def found() -> set[str]:
    names = set()
    for module, file in files_of(*EVERY):
        tree = ast.parse(file.read_text())
        names |= {f"{module}.{name}" for name in (*state(tree), *patches(tree))}
    return names


def test_the_page_lists_what_is_kept_and_nothing_else():
    rows = re.findall(r"^\| `(shardcore[\w.]+)` \|", PAGE.read_text(), re.MULTILINE)
    assert len(rows) == len(set(rows))
    # They set attributes of torch, of TRL and of sys.
    elsewhere = {
        "shardcore.apply.errors.tell_once",
        "shardcore_trainer._rewards.gathering_over",
        "shardcore_transformers.holders.CHANGES",
        "shardcore_peft.client.CHANGES",
        "shardcore.comm.strided.install",
        "shardcore.nn.process.refuse_dropped_data",
        "shardcore.nn.process.refuse_draws_on_cpu",
        "shardcore.nn.process.warn_of_partial_numbers",
        "shardcore.nn.optimizers.find_inf_on_all_ranks",
        "shardcore.nn.optimizers.step_parts",
        "shardcore.nn.slices.refuse_lost_writes",
    }
    assert set(rows) - elsewhere == found()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("KNOWN = {}", "KNOWN"),
        ("known: list[int] = []", "known"),
        ("known = {1: 2}\ndef add():\n    known[3] = 4", "known"),
        ("known = {1}\ndef add():\n    known.add(2)", "known"),
        ("local = threading.local()", "local"),
        ("def f():\n    global count\n    count = 1", "count"),
        ("@functools.lru_cache(maxsize=None)\ndef f(x): return x", "f"),
        ("class State:\n    depth = 0\ndef enter():\n    State.depth += 1", "State"),
    ],
)
def test_what_changes_is_found(text, name):
    assert name in set(state(ast.parse(text)))


def test_what_does_not_change_is_not_found():
    text = "__all__ = []\nWORDS = ('a', 'b')\nTABLE = {1: 2}\nNAME = re.compile('x')\nclass A:\n    depth = 0"
    assert set(state(ast.parse(text))) - {"__all__"} == set()
