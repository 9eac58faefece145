"""Plans as data: what enters the digest, and that it is the same in every process."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from planned import plan_of, policy_of
from tiny import TinyPolicy, build
from torch import nn

from shardcore.compile import compile_plan
from shardcore.config import ShardConfig
from shardcore.styles import attribute, replicate
from shardcore_shardformer import ModulePolicyDescription
from shardcore_shardformer.steps import ReplaceMethods


def test_plans_are_data():
    plan = plan_of()
    assert json.loads(json.dumps(plan.to_json())) == plan.to_json()
    assert plan == plan_of()
    assert hash(plan) == hash(plan_of())
    assert plan.digest == plan_of().digest
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.steps = ()


def _other_rows(**changes):
    class Other(TinyPolicy):
        def module_policy(self):
            return {**super().module_policy(), **changes}

    Other.__module__, Other.__qualname__ = TinyPolicy.__module__, TinyPolicy.__qualname__
    return Other


def test_the_digest_changes_with_anything_that_matters():
    base = plan_of()
    rows = TinyPolicy().module_policy()
    others = {
        "ranks": plan_of(tp=4),
        "mode": plan_of(partial_gradients="deferred"),
        "shape": plan_of(build(inner=46)),
        "dtype": plan_of(build(dtype=torch.float32)),
        "ties": plan_of(build(tied=True)),
        "layers": plan_of(build(layers=3)),
        "origin": compile_plan(TinyPolicy(), build(), ShardConfig(tensor_parallel_size=2), origin="shard-tiny 1.0"),
        "layout": plan_of(policy=_other_rows(TinyLM=[replicate("head")])),
        "attribute": plan_of(policy=_other_rows(Block=[*rows["Block"][:-1], attribute("attention.num_heads", 3)])),
        "no attribute": plan_of(policy=_other_rows(Block=rows["Block"][:-1])),
    }
    digests = {base.digest, *(plan.digest for plan in others.values())}
    assert len(digests) == 1 + len(others)


def one(module, group):
    return 1


def test_user_code_enters_the_digest_by_its_source():
    def plan(function):
        description = ModulePolicyDescription(method_replacement={"forward": function})
        made = policy_of({"Linear": description, "Sequential": [replicate("0")]})
        return plan_of(nn.Sequential(nn.Linear(4, 4)), made)

    def forward(self, x):
        return x + 1

    first = forward

    def forward(self, x):
        return x + 2

    assert first.__qualname__ == forward.__qualname__
    assert plan(first).digest != plan(forward).digest
    assert plan(first).digest == plan(first).digest
    assert plan(one).digest != plan(first).digest
    assert isinstance(plan(one).steps[-1], ReplaceMethods)
    made = [eval(f"lambda self, x: x + {n}") for n in (1, 1, 2)]  # no source to be found
    assert plan(made[0]).digest == plan(made[1]).digest != plan(made[2]).digest


_SCRIPT = """
from planned import plan_of, policy_of
from tiny import TinyPolicy, build
from shardcore.config import ShardConfig
from shardcore.compile import compile_plan
import test_plan_data
for policy in (TinyPolicy, test_plan_data.Shardformers):
    print(compile_plan(policy, build(), ShardConfig(tensor_parallel_size=4)).digest)
"""

_POLICY = """
from shardcore.policy import Policy
from shardcore_shardformer import ModulePolicyDescription
from shardcore_shardformer.steps import ReplaceMethods
from shardcore.nn import ColumnLinear
from planned import plan_of, policy_of
from tiny import TinyPolicy

def replaced(self, *args):
    return {"a", "b", "c"}

class Shardformers(TinyPolicy):
    def module_policy(self):
        more = ModulePolicyDescription(method_replacement={"extra_repr": replaced, "forward": replaced},
                                       attribute_replacement={"training": {"x": object(), "y": {1: 2}}})
        return {**super().module_policy(), "Mlp": more}
"""


@pytest.mark.nightly
def test_the_digest_is_the_same_in_every_process(tmp_path):
    """H28."""
    (tmp_path / "test_plan_data.py").write_text(_POLICY)
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1] / "support"), *filter(None, sys.path)])
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("0", "1", "42")
    ]
    printed = [process.communicate(timeout=100)[0].split() for process in started]
    assert all(len(digests) == 2 for digests in printed)
    assert printed[0] == printed[1] == printed[2]
    assert printed[0][0] == plan_of(tp=4).digest
