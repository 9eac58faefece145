"""What packs bring to a model that is sharded: observers around it, and modules inside it."""

from __future__ import annotations

import json
import sys

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from given_packs import HEAD, hook, install, installed, offers, serves
from tiny import TinyPolicy, batch, build
from torch.distributed.tensor import DTensor

import shardcore
from shardcore.apply.sharder import ModelSharder
from shardcore.errors import AgreementError, PackError, PartlyShardedError
from shardcore.nn import Replicated
from shardcore_cli import main
from shardcore_testing.parity import assert_close, assert_same_gradients

POLICY = "from tiny import TinyPolicy\nclass ModelPolicy(TinyPolicy): pass\n"

PREPROCESSING = """
from tiny import TinyPolicy
class ModelPolicy(TinyPolicy):
    def preprocess(self):
        self.model.touched = True
"""

WATCH = """
LOG = []
def kind(model):
    return type(next(model.parameters())).__name__
"""

FUSED = """
from shardcore.nn import ColumnLinear, Replicated
class FusedNorm(Replicated):
    def forward(self, x):
        self.__dict__["runs"] = self.__dict__.get("runs", 0) + 1
        return super().forward(x)
class OtherColumn(ColumnLinear):
    pass
class PickyNorm(Replicated):
    @classmethod
    def problem(cls, module, ranks, **options):
        return "this kernel wants a hidden size of 4096, got 32"
"""


def watches(before="", after=""):
    """Return a plugin that logs what it sees, and then does what is given."""
    log = "LOG.append((kind(model), len(plan.steps) > 0)); "
    return (
        HEAD
        + WATCH
        + hook("shardcore_before_shard", log + before, "model, plan").removeprefix(HEAD)
        + hook("shardcore_after_shard", log + after, "model, plan").removeprefix(HEAD)
    )


@pytest.fixture
def target(tmp_path):
    install(tmp_path, "tiny", serves("shard_tiny"), modules={"policy": POLICY})
    return tmp_path


def log(name):
    return sys.modules[f"shard_{name}.plugin"].LOG


# --- observers ---


@pytest.mark.parametrize("world", [1, 2])
def test_observers_see_the_model_before_and_after(pool, target, world):
    install(target, "watch", watches())
    pool.run(observed, target, world=world)


def observed(folder):
    with installed(folder):
        shardcore.shard(build())
        split = dist.get_world_size() > 1
        assert log("watch") == [("Parameter", split), ("DTensor" if split else "Parameter", split)]
        shardcore.shard(build(), policy=TinyPolicy)
        assert len(log("watch")) == 2  # a policy given by hand bypasses discovery


def test_an_error_before_is_one_on_all_ranks_and_changes_nothing(pool, target):
    install(target, "watch", watches(before="import torch.distributed as d; 1 / (d.get_rank() - 1)"))
    install(target, "zzz", watches())
    install(target, "tiny2", serves("shard_tiny2", rest="priority=1"), modules={"policy": PREPROCESSING})
    zero, one = pool.run(fails_before, target, world=2)
    error = "pack watch (shard-watch 1.0): shardcore_before_shard failed for a TinyLM: ZeroDivisionError: "
    assert one.startswith(error)
    assert zero.startswith(f"rank 1 failed, so no rank was changed. Its error: PackError: {error}")


def fails_before(folder):
    with installed(folder):
        model, reference = build(), build()
        with pytest.raises((PackError, AgreementError)) as caught:
            shardcore.shard(model)
        assert type(caught.value) is (PackError if dist.get_rank() else AgreementError)
        assert type(model) is type(reference)
        assert not hasattr(model, "touched")
        assert not any(isinstance(p, DTensor) for p in model.parameters())
        assert_close(reference(batch()), model(batch()), "output")
        assert len(log("zzz")) == 1 - dist.get_rank()  # packs after the one that failed were not asked
        shardcore.shard(model, policy=TinyPolicy)  # nothing is left behind that would be in the way
        return str(caught.value)


def test_an_error_after_leaves_a_model_that_says_so_on_all_ranks(pool, target):
    install(target, "watch", watches(after="import torch.distributed as d; 1 / (d.get_rank() - 1)"))
    for message in pool.run(fails_after, target, world=2):
        assert "pack watch (shard-watch 1.0): shardcore_after_shard failed for a TinyLM: ZeroDivisionError" in message
        assert "The model is unusable; build it anew." in message


def fails_after(folder):
    with installed(folder):
        model = build()
        with pytest.raises(PartlyShardedError) as caught:
            shardcore.shard(model)
        with pytest.raises(PartlyShardedError, match="build it anew"):
            model(batch())
        return str(caught.value)


# --- modules ---


def brings(module, native, replaces, rest=""):
    spec = f"ParallelModuleSpec(target='torch.nn.modules.{native}', module='shard_k.m:{module}', replaces='{replaces}'"
    return offers("shardcore_parallel_modules", f"{spec}, {rest})")


def test_a_brought_module_takes_the_place_of_shardcores(pool, target):
    install(target, "k", brings("FusedNorm", "normalization.LayerNorm", "Replicated"), modules={"m": FUSED})
    pool.run(with_modules, target, world=2)


def with_modules(folder):
    reference = build()
    with installed(folder):
        model = shardcore.shard(build())
        assert_close(reference(batch()), model(batch()), "output")
        reference(batch(), labels=batch(1)).backward()
        model(batch(), labels=batch(1)).backward()
        assert_same_gradients(reference, model)
        fused = sys.modules["shard_k.m"].FusedNorm
        norms = [m for m in model.modules() if isinstance(m, torch.nn.LayerNorm)]
        assert len(norms) == 9
        assert all(isinstance(norm, fused) and norm.runs == 2 for norm in norms)
        given = shardcore.shard(build(), policy=TinyPolicy)
        assert not any(isinstance(m, fused) for m in given.modules())
        assert any(isinstance(m, Replicated) for m in given.modules())


def test_a_switch_of_the_configuration_turns_it_on(target):
    plugin = brings("OtherColumn", "linear.Linear", "ColumnLinear", "option='enable_fused_normalization'")
    install(target, "k", plugin, modules={"m": FUSED})
    with installed(target):
        for on in (True, False, None):
            sharder = ModelSharder(build(), None, shardcore.ShardConfig(enable_fused_normalization=on))
            names = {type(step).__name__: step for step in sharder.compile().steps}
            assert names == {}  # one rank: rows do nothing
            registry = sharder._registry
            plan = shardcore.compile_plan(
                sharder.policy,
                build(),
                shardcore.ShardConfig(tensor_parallel_size=2, enable_fused_normalization=on),
                modules=registry.modules_for(sharder.config),
            )
            targets = {step.target.__name__ for step in plan.steps if hasattr(step, "target")}
            assert ("OtherColumn" in targets) is bool(on)
            assert ("ColumnLinear" in targets) is not on


def test_a_brought_module_that_refuses_is_a_problem_of_the_plan(target):
    install(target, "k", brings("PickyNorm", "normalization.LayerNorm", "Replicated"), modules={"m": FUSED})
    with installed(target), pytest.raises(shardcore.PlanError) as caught:
        ModelSharder(build()).compile()
    problem = caught.value.problems[0]
    assert problem.what == "this kernel wants a hidden size of 4096, got 32"


def test_the_command_explains_what_is_brought(target):
    net = "from torch import nn\nclass Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    net += "        self.norm = nn.LayerNorm(8)\n"
    policy = "from shardcore import Policy\nfrom shardcore.styles import norm\nclass ModelPolicy(Policy):\n"
    policy += "    def module_policy(self):\n        return {'Net': [norm('norm')]}\n"
    install(target, "net", serves("shard_net", "shard_net.net.Net"), modules={"net": net, "policy": policy})
    install(target, "k", brings("FusedNorm", "normalization.LayerNorm", "Replicated"), modules={"m": FUSED})
    with installed(target):
        result = CliRunner().invoke(main, ["explain", "shard_net.net.Net", "--tp", "2", "--json"])
    (step,) = json.loads(result.output)["plan"]["steps"]
    assert (step["path"], step["target"]) == ("norm", "shard_k.m.FusedNorm")


def test_ranks_with_different_modules_are_told_where(pool, tmp_path, target):
    other = tmp_path / "other"
    install(other, "tiny", serves("shard_tiny"), modules={"policy": POLICY})
    for folder, module in ((target, "FusedNorm"), (other, "FusedNorm2")):
        source = FUSED.replace("FusedNorm", module)
        install(folder, "k", brings(module, "normalization.LayerNorm", "Replicated"), modules={"m": source})
    for message in pool.run(different_modules, [target, other], world=2):
        assert message.startswith("ranks 0 and 1 differ in step ")
        assert "becomes shard_k.m.FusedNorm(" in message
        assert "becomes shard_k.m.FusedNorm2(" in message


def different_modules(folders):
    with installed(folders[dist.get_rank()]):
        model = build()
        with pytest.raises(AgreementError) as caught:
            shardcore.shard(model)
        assert type(model) is type(build())
        return str(caught.value)
