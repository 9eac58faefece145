"""What Shardformer's descriptions are to the core: rules, and steps of a plan that it does not know."""

from __future__ import annotations

import pytest
from torch import nn

from shardcore.compile import compile_plan
from shardcore.config import ShardConfig
from shardcore.errors import PlanError
from shardcore.nn import ColumnLinear
from shardcore.policy import Policy
from shardcore.styles import replicate
from shardcore_shardformer import ModulePolicyDescription, SubModuleReplacementDescription
from shardcore_shardformer.steps import ReplaceMethods, ReplaceModule, ReplaceParameters


def _problems(model, rules):
    class Made(Policy):
        def module_policy(self):
            return rules

    with pytest.raises(PlanError) as caught:
        compile_plan(Made, model, ShardConfig(tensor_parallel_size=2))
    return caught.value


def test_descriptions_take_positional_arguments():
    """As people wrote them for Shardformer."""
    item = SubModuleReplacementDescription("fc", nn.Linear, {"a": 1}, True)
    assert (item.suffix, item.target_module, item.kwargs, item.ignore_if_not_exist) == ("fc", nn.Linear, {"a": 1}, True)
    description = ModulePolicyDescription({"n": 1}, [print], [item], {"forward": print})
    assert description.attribute_replacement == {"n": 1}
    assert description.param_replacement == [print]
    assert description.sub_module_replacement == [item]
    assert description.method_replacement == {"forward": print}


def test_a_missing_attribute_is_a_problem():
    """H13, as in the other way of writing."""
    description = ModulePolicyDescription(attribute_replacement={"num_heads": 1})
    error = _problems(nn.Sequential(nn.Linear(4, 4)), {"Linear": description, "Sequential": [replicate("0")]})
    assert [p.what for p in error.problems] == [
        "Linear has no attribute 'num_heads'; setting it would create one that nothing reads"
    ]


def test_a_missing_method_and_a_missing_submodule_of_a_description():
    description = ModulePolicyDescription(
        method_replacement={"go": print},
        sub_module_replacement=[
            SubModuleReplacementDescription("gone", ColumnLinear),
            SubModuleReplacementDescription("maybe", ColumnLinear, None, True),
        ],
    )
    error = _problems(nn.Sequential(nn.Linear(4, 4)), {"Sequential": description, "Linear": [replicate("")]})
    assert [(p.where, p.what.split(";")[0], p.rule) for p in error.problems] == [
        ("", "Sequential has no submodule 'gone'", "SubModuleReplacementDescription('gone', ColumnLinear)"),
        ("", "Sequential has no method 'go'", "method_replacement ['go']"),
    ]


def test_options_that_are_none():
    for options, said in (
        ({"replication": [2]}, "ColumnLinear does not understand its options"),  # unhashable, and no number
        ({"overlap": True}, "ColumnLinear does not understand overlap; its options are "),
    ):
        item = SubModuleReplacementDescription("0", ColumnLinear, options)
        description = ModulePolicyDescription(sub_module_replacement=[item])
        assert said in str(_problems(nn.Sequential(nn.Linear(8, 8)), {"Sequential": description}))


def function():
    pass


def test_steps_describe_themselves():
    assert "test_descriptions.function#" in ReplaceParameters(path="a", function=function).describe()
    assert ReplaceMethods(path="a", methods=(("forward", function),)).describe().startswith("ReplaceMethods(methods=")
    assert "ColumnLinear" in ReplaceModule(path="a", target=ColumnLinear).describe()
