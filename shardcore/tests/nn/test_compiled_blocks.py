"""What ``enable_jit_fused`` adds to a plan, and that compiled blocks compute the same."""

from __future__ import annotations

import copy
import functools
import gc
import warnings
import weakref

import pytest
import torch
from planned import plan_of, problems_of
from rms import RmsBlock, RmsPolicy, compare, rms_net
from tiny import shard
from torch._dynamo.utils import counters

from shardcore._torch import CAN_TRACE
from shardcore.compile.switches import Choice
from shardcore.config.recomputation import GradientCheckpointConfig
from shardcore.nn import blocks
from shardcore.nn.base import with_methods
from shardcore.nn.blocks import CompiledBlock
from shardcore.nn.mixin import add_mixin
from shardcore.plan.steps.local import Compile, Recompute


def test_blocks_are_compiled():
    plan = plan_of(rms_net(), RmsPolicy, enable_jit_fused=True)
    assert [s.path for s in plan.steps if isinstance(s, Compile)] == [f"blocks.{i}" for i in range(3)]
    assert plan.choices == (Choice(switch="enable_jit_fused", outcome="3 blocks are compiled while training"),)
    assert "compiled while training" in plan.render()
    assert not [s for s in plan_of(rms_net(), RmsPolicy).steps if isinstance(s, Compile)]
    both = plan_of(
        rms_net(),
        RmsPolicy,
        enable_jit_fused=True,
        gradient_checkpoint_config=GradientCheckpointConfig(num_ckpt_layers=1),
    )
    order = [type(s) for s in both.steps if isinstance(s, Compile | Recompute)]
    assert order == [Compile] * 3 + [Recompute], "a block is recomputed around what is compiled"


class NoBlocks(RmsPolicy):
    stages = None


@pytest.mark.parametrize(
    ("policy", "fields", "says"),
    [
        (NoBlocks, {}, "NoBlocks does not say where the model's blocks are"),
        (RmsPolicy, {"inference_only": True}, "inference_only=True rules that out"),
    ],
)
def test_blocks_that_cannot_be_compiled(policy, fields, says):
    (problem,) = problems_of(rms_net(), policy, enable_jit_fused=True, **fields)
    assert says in problem
    assert "ShardConfig.enable_jit_fused=True" in problem
    (choice,) = plan_of(rms_net(), policy, enable_jit_fused="auto", **fields).choices
    assert choice.outcome == "off: compiling gained nothing where it was measured, on the CPU"


def test_no_compiler(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    (problem,) = problems_of(rms_net(), RmsPolicy, enable_jit_fused=True)
    assert "torch.compile needs a C++ compiler on the CPU, and none was found (install g++, or set CXX)" in problem


class Scaled(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale  # a graph for each

    def forward(self, x):
        return x * self.scale


@pytest.mark.skipif(not blocks._LIMIT, reason="this torch takes no number of graphs")
def test_blocks_of_many_kinds_stay_compiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    x = torch.ones(2, requires_grad=True)
    for scale in range(2, 14):
        block = Scaled(scale).train()
        add_mixin(block, CompiledBlock)
        assert torch.equal(block(x), x * scale)
    assert counters["stats"]["unique_graphs"] == 12


@pytest.mark.slow("the compiler takes its time")
def test_a_compiled_block_computes_the_same(pool):
    pool.run(_compiled, world=2, timeout=100)


def _compiled():
    torch._dynamo.reset()
    counters.clear()
    reference = rms_net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of its own doings while it traces
        compare(reference, shard(copy.deepcopy(reference), RmsPolicy, tp=2, enable_jit_fused=True).train())
    assert counters["stats"]["unique_graphs"] == 1 or not CAN_TRACE, "one graph serves all blocks"


def _only_called(function, **options):
    @functools.wraps(function)
    def call(*args):
        return function(*args)

    return call


def test_what_else_a_block_does_is_compiled_with_it(monkeypatch):
    monkeypatch.setattr(torch, "compile", _only_called)
    block = RmsBlock()
    with_methods(block, {"forward": _doubled})
    add_mixin(block.train(), CompiledBlock)
    assert block(torch.ones(1, 2, 16)).unique().tolist() == [2.0]


def _doubled(self, x):
    return 2 * x


def test_classes_of_compiled_blocks_are_freed():
    def made() -> weakref.ref[type]:
        class Own(RmsBlock):
            def forward(self, x):
                return super().forward(x)  # its function knows its class

        blocks = [Own(), Own()]
        for block in blocks:
            add_mixin(block.train(), CompiledBlock)
            block(torch.ones(1, 2, 16)).sum().backward()
        known = [block.__dict__["_shard_compiled"] for block in blocks]
        assert known[0][1] is known[1][1], "blocks of a class share what was compiled"
        twin = copy.deepcopy(blocks[0])
        assert twin.__dict__["_shard_compiled"][1] is known[0][1]
        return weakref.ref(Own)

    with pytest.MonkeyPatch.context() as patch:
        # What torch keeps of a graph is its own affair: here it is only called.
        patch.setattr(torch, "compile", _only_called)
        own = made()
    gc.collect()
    assert own() is None
