from __future__ import annotations

import builtins
import re

import pytest

from shardcore import errors
from shardcore.errors import MissingRanksError, PlanError, Problem

NODE = re.compile(r"^(?P<branches>(?:[│ ]   )*(?:[├└]── )?)(?P<name>[A-Z]\w*)(?: \((?P<builtin>\w+)\))?(?:  +\S.*)?$")

HEADS = Problem(
    where="model.layers.0.self_attn",
    rule="Heads('num_attention_heads')",
    what="6 heads cannot be split over 4 ranks",
    todo="use a tensor_parallel_size that divides 6",
)
WHOLE = Problem(where="", rule="vocab('embed')", what="no submodule 'embed'", todo="say optional=True")


def _classes() -> dict[str, type]:
    return {
        name: value for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)
    }


def _drawn(text: str) -> dict[str, set[str]]:
    """Return class name -> names of its bases, as the tree in a docstring has them."""
    bases: dict[str, set[str]] = {}
    path: list[str] = []
    for node in filter(None, map(NODE.match, text.splitlines())):
        depth = len(node["branches"]) // 4
        path[depth:] = [node["name"]]
        bases[node["name"]] = {name for name in (*path[depth - 1 : depth], node["builtin"]) if name}
    return bases


def _real() -> dict[str, set[str]]:
    bases = {name: {base.__name__ for base in cls.__bases__} for name, cls in _classes().items()}
    # Exception is what a class without brackets derives from.
    return {name: above - {"Exception"} for name, above in bases.items()}


def test_the_tree_in_the_docstring_is_the_real_one() -> None:
    assert _drawn(errors.__doc__ or "") == _real()


def test_the_reader_of_the_tree_sees_differences() -> None:
    tree = "A\n├── B (ValueError)   text\n│   └── C   text\n└── D (KeyError)   text"
    assert _drawn(tree) == {"A": set(), "B": {"A", "ValueError"}, "C": {"B"}, "D": {"A", "KeyError"}}


def test_all_is_sorted_and_complete() -> None:
    assert errors.__all__ == sorted({*_classes(), "Problem"})


@pytest.mark.parametrize("cls", _classes().values())
def test_names_say_what_they_are(cls: type) -> None:
    suffix = "Warning" if issubclass(cls, Warning) else "Error"
    assert cls.__name__.endswith(suffix)
    assert cls.__doc__
    assert cls.__doc__.endswith(".")
    assert not hasattr(builtins, cls.__name__)


def test_plan_error_says_everything() -> None:
    error = PlanError("LlamaForCausalLM with shard-llama 0.1.0 at tp=4", [HEADS, WHOLE])
    assert error.problems == (HEADS, WHOLE)
    assert str(error).splitlines() == [
        "LlamaForCausalLM with shard-llama 0.1.0 at tp=4: 2 problems; nothing was changed.",
        "  1. model.layers.0.self_attn: 6 heads cannot be split over 4 ranks",
        "    rule: Heads('num_attention_heads')",
        "    next: use a tensor_parallel_size that divides 6",
        "  2. (the model itself): no submodule 'embed'",
        "    rule: vocab('embed')",
        "    next: say optional=True",
    ]


def test_plan_error_counts_in_english() -> None:
    assert str(PlanError("Mlp", [WHOLE])).startswith("Mlp: 1 problem; nothing was changed.\n")


def test_missing_ranks_error_names_them() -> None:
    error = MissingRanksError("ranks 1 and 3 did not call shard()", [1, 3])
    assert error.missing == (1, 3)
    assert str(error) == "ranks 1 and 3 did not call shard()"
