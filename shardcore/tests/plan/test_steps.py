from __future__ import annotations

import functools

from torch import nn

from shardcore.nn import ColumnLinear, ReplicatedLayout, ShardedLayout
from shardcore.plan.digest import to_data
from shardcore.plan.steps.modules import SetAttribute, Swap
from shardcore.plan.steps.outputs import GatherOutputs
from shardcore.plan.steps.regions import EnterRegion


def function():
    return 1


def test_values_become_json():
    assert to_data((1, 2.5, "a", None, True)) == [1, 2.5, "a", None, True]
    assert to_data({"b": (1,), "a": {2: 3}}) == {"a": {"2": 3}, "b": [1]}
    assert list(to_data({"b": 1, "a": 2})) == ["a", "b"]
    assert to_data(nn.Linear) == "torch.nn.modules.linear.Linear"
    assert to_data(ShardedLayout(1)) == {"kind": "ShardedLayout", "dim": 1}
    assert to_data(ReplicatedLayout(partial_gradient=True)) == {"kind": "ReplicatedLayout", "partial_gradient": True}
    assert to_data(object()) == "builtins.object", "no addresses"


def test_functions_are_known_by_name_and_source():
    name, _, digest = to_data(function).partition("#")
    assert name.endswith("test_steps.function")
    assert len(digest) == 16
    assert to_data(functools.partial(function, 1)) != to_data(functools.partial(function, 2))
    assert to_data(len).startswith("builtins.len#")


def test_steps_describe_themselves():
    assert Swap(path="a", target=ColumnLinear).describe() == "ColumnLinear"
    assert (
        Swap(path="a", target=ColumnLinear, options=(("replication", 2),)).describe() == "ColumnLinear(replication=2)"
    )
    assert SetAttribute(path="a", name="n", value=3).describe() == "n = 3"
    assert GatherOutputs(path="", dims=(("attentions", 1, 8),)).describe() == "gathers attentions on dim 1 to 8"
    region = EnterRegion(path="m", argument=("x", 0), members=("a", "b"), row="c", block="")
    assert region.describe() == "enters with 'x' for a, b, leaves at c"
