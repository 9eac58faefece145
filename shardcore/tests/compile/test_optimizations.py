"""What the switches of a configuration add to a plan, and that it computes the same."""

from __future__ import annotations

import copy
import cProfile
import pickle
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from planned import plan_of, problems_of
from rms import RmsBlock, RmsPolicy, RootMeanSquare, compare, rms_net, x_of
from tiny import TinyPolicy, batch, build, shard
from torch import nn

import shardcore
from shardcore.compile import compile_plan
from shardcore.compile.switches import Choice
from shardcore.config import ShardConfig
from shardcore.config.recomputation import GradientCheckpointConfig
from shardcore.errors import NotSupportedError
from shardcore.nn import FusedRMSNorm, Replicated
from shardcore.nn.blocks import RecomputedBlock
from shardcore.nn.mixin import add_mixin
from shardcore.nn.region.region import Region
from shardcore.plan.steps.local import FreezeForInference, FuseNorm, Recompute
from shardcore.plan.steps.modules import SetAttribute
from shardcore.plan.steps.regions import EnterRegion
from shardcore.policy import Stages
from shardcore_testing.parity import assert_close, assert_same_gradients

# Fused norms.


def test_norms_that_are_written_out_are_fused():
    plan = plan_of(rms_net(), RmsPolicy, enable_fused_normalization=True)
    assert [s.path for s in plan.steps if isinstance(s, FuseNorm)] == [f"blocks.{i}.norm" for i in range(3)]
    assert plan.choices == (Choice(switch="enable_fused_normalization", outcome="torch's rms_norm for 3 modules"),)
    assert "enable_fused_normalization: torch's rms_norm for 3 modules" in plan.render()
    assert "torch's fused rms_norm" in plan.render()
    assert not [s for s in plan_of(rms_net(), RmsPolicy).steps if isinstance(s, FuseNorm)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_norms_of_16_bits_are_fused_by_default(dtype):
    def fused(**fields):
        steps = plan_of(rms_net().to(dtype), RmsPolicy, **fields).steps
        return len([s for s in steps if isinstance(s, FuseNorm)])

    assert fused() == (3 if dtype.itemsize == 2 else 0)
    assert fused(enable_fused_normalization=False) == fused(tp=1) == 0
    norm = rms_net().to(dtype).blocks[0].norm
    x = torch.randn(64, norm.weight.numel(), generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = copy.deepcopy(norm).double()(x.double())
    written_out = (norm(x) - exact).abs().max()
    add_mixin(norm, FusedRMSNorm)
    norm._shard_eps = RmsPolicy.rms
    assert (norm(x) - exact).abs().max() <= written_out + torch.finfo(dtype).eps * exact.abs().max() / 2


def test_torchs_own_norms_are_fused_already():
    plan = plan_of(enable_fused_normalization=True)
    assert [choice.outcome for choice in plan.choices] == ["nothing to do: torch's own norms are fused"]


def test_a_norm_without_a_fused_form():
    class Unnamed(RmsPolicy):
        rms = None

    (problem, *_) = problems_of(rms_net(), Unnamed, enable_fused_normalization=True)
    assert problem.startswith(
        "blocks.0.norm: enable_fused_normalization=True, but no fused form of RootMeanSquare is known"
    )
    assert not [
        s for s in plan_of(rms_net(), Unnamed, enable_fused_normalization="auto").steps if isinstance(s, FuseNorm)
    ]

    class Misnamed(RmsPolicy):
        rms = "eps"

    (problem, *_) = problems_of(rms_net(), Misnamed, enable_fused_normalization="auto")
    assert problem.startswith("blocks.0.norm: RootMeanSquare has no attribute 'eps'")

    net = rms_net()
    net.blocks[0].norm.bias = nn.Parameter(torch.ones(16))
    (problem,) = problems_of(net, RmsPolicy, enable_fused_normalization="auto")
    what = "RootMeanSquare has the parameters bias, weight; a root-mean-square norm has a weight alone"
    assert problem.startswith(f"blocks.0.norm: {what}")


class Brought(Replicated):
    """A norm that a pack brings."""


@pytest.mark.parametrize(
    ("tp", "outcome"), [(1, "torch's rms_norm for 3 modules"), (2, "Brought of a pack for 3 modules")]
)
def test_a_norm_that_a_pack_brings_is_not_fused_again(tp, outcome):
    config = ShardConfig.of(tp=tp, enable_fused_normalization=True)
    brought = {RootMeanSquare: Brought}
    plan = compile_plan(RmsPolicy, rms_net(), config, modules=lambda native, _: brought.get(native))
    assert [choice.outcome for choice in plan.choices] == [outcome]
    assert len([s for s in plan.steps if isinstance(s, FuseNorm)]) == (3 if tp == 1 else 0)


def fused_norms():
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.bfloat16, 2e-2)):
        reference = rms_net(dtype)
        twin = copy.deepcopy(reference)
        sharded = shard(copy.deepcopy(reference), RmsPolicy, enable_fused_normalization=True)
        assert all(isinstance(block.norm, FusedRMSNorm) for block in sharded.blocks)
        assert all(type(block.norm).__name__ == "RootMeanSquare" for block in sharded.blocks)
        assert type(twin.blocks[0].norm) is RootMeanSquare
        compare(reference, sharded, tolerance)
        with mock.patch.object(F, "rms_norm", wraps=F.rms_norm) as fused:
            sharded(x_of(dtype=dtype))
        assert fused.call_count == 3


def test_fused_norms_compute_the_same(pool):
    pool.run(fused_norms, world=2)


def test_one_rank_alone_gets_its_wishes_too():
    reference = rms_net()
    net = shardcore.shard(
        copy.deepcopy(reference),
        policy=RmsPolicy,
        enable_fused_normalization=True,
        gradient_checkpoint_config=GradientCheckpointConfig(num_ckpt_layers=1),
    )
    assert all(isinstance(block.norm, FusedRMSNorm) for block in net.blocks)
    assert [isinstance(block, RecomputedBlock) for block in net.blocks] == [True, False, False]
    compare(reference, net)
    for same in (pickle.loads(pickle.dumps(net)), copy.deepcopy(net)):
        assert [type(module) for module in same.modules()] == [type(module) for module in net.modules()]
        assert torch.equal(same(x_of()), net(x_of()))


def test_a_weight_of_another_dtype():
    module = RootMeanSquare(16).to(torch.float32)
    x = (x_of() / 100).to(torch.bfloat16)  # so small that the constant below the root counts
    wanted = module(x)
    FusedRMSNorm.swap_class(module, None, eps="epsilon")
    got = module(x)
    assert got.dtype == wanted.dtype == torch.float32
    assert_close(wanted, got, "output", 1e-2)


# RecomputedBlock blocks.


@pytest.mark.parametrize(("config", "count"), [({"num_ckpt_layers": 2}, 2), ({"gradient_checkpointing_ratio": 0.5}, 1)])
def test_the_first_blocks_are_recomputed(config, count):
    plan = plan_of(rms_net(), RmsPolicy, gradient_checkpoint_config=GradientCheckpointConfig(**config))
    assert [s.path for s in plan.steps if isinstance(s, Recompute)] == [f"blocks.{i}" for i in range(count)]
    assert "recomputed in the backward" in plan.render()


def test_blocks_that_cannot_be_recomputed():
    class Nowhere(RmsPolicy):
        stages = None

    switch = GradientCheckpointConfig(num_ckpt_layers=1)
    (problem,) = problems_of(rms_net(), Nowhere, gradient_checkpoint_config=switch)
    assert "Nowhere does not say where the model's blocks are" in problem
    (problem,) = problems_of(
        rms_net(), RmsPolicy, gradient_checkpoint_config=GradientCheckpointConfig(num_ckpt_layers=4)
    )
    assert "num_ckpt_layers is 4, but the model has 3 blocks" in problem

    class Elsewhere(RmsPolicy):
        stages = Stages(blocks="layers", last=("blocks", "last"))

    (problem,) = problems_of(
        rms_net(), Elsewhere, gradient_checkpoint_config=switch
    )  # and nothing that follows from it
    assert problem.startswith("layers: RmsNet has no submodule or parameter 'layers'")


def test_a_blocks_keywords_reach_the_block():
    class Named(RmsBlock):
        def forward(self, x, debug=1.0):
            return super().forward(x) * debug

    block, x = Named(), x_of(dtype=torch.float32)
    wanted = block(x, debug=3.0)
    add_mixin(block, RecomputedBlock)
    assert torch.equal(block(x, debug=3.0), wanted)


def recomputation(dropout):
    counts = []
    for config in (None, GradientCheckpointConfig(num_ckpt_layers=1)):
        reference = build(dropout=dropout)
        sharded = shardcore.shard(
            copy.deepcopy(reference), policy=TinyPolicy, tp=dist.get_world_size(), gradient_checkpoint_config=config
        )
        shardcore.manual_seed(sharded, 5)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t.numel()) or t, lambda t: t):
            loss = sharded(batch(0), labels=batch(1))
        loss.backward()
        counts.append(
            (sum(kept), float(loss.detach()), {n: p.grad.full_tensor() for n, p in sharded.named_parameters()})
        )
        if not dropout:
            reference(batch(0), labels=batch(1)).backward()
            assert_same_gradients(reference, sharded)
    (more, loss, grads), (less, again, same) = counts
    assert less < 0.75 * more
    assert loss == pytest.approx(again, rel=1e-12)
    for name, grad in grads.items():
        assert_close(grad, same[name], name)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_recomputation_changes_memory_only(pool, dropout):
    pool.run(recomputation, dropout, world=2)


def test_blocks_are_not_recomputed_in_eval_mode():
    net = shardcore.shard(
        rms_net(), policy=RmsPolicy, gradient_checkpoint_config=GradientCheckpointConfig(num_ckpt_layers=3)
    )
    calls = []
    net.blocks[0].up.register_forward_hook(lambda *_: calls.append(1))
    net.eval()(x_of()).sum().backward()
    assert len(calls) == 1
    net.train()(x_of()).sum().backward()
    assert len(calls) == 3


# Inference.


def test_inference_plans_nothing_for_a_backward():
    plan = plan_of(inference_only=True)
    assert not [s for s in plan.steps if isinstance(s, EnterRegion)]
    assert [s for s in plan.steps if isinstance(s, FreezeForInference)]
    assert "eval mode, no gradients" in plan.render()


def inference():
    reference = build(dropout=0.2).eval()
    sharded = shard(build(dropout=0.2), inference_only=True)
    assert not sharded.training
    assert not any(p.requires_grad for p in sharded.parameters())
    hooks = [h for m in sharded.modules() for h in m._forward_pre_hooks.values()]
    assert not any(isinstance(hook, Region) for hook in hooks)
    got = sharded(batch())
    assert got.grad_fn is None
    assert_close(reference(batch()), got, "logits")
    # A gradient that somebody asks for all the same is right.
    inputs = [torch.randn(2, 5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) for _ in (0, 1)]
    for model, x in zip((reference, sharded), inputs, strict=True):
        model(inputs=x.requires_grad_()).square().sum().backward()
    assert_close(inputs[0].grad, inputs[1].grad, "input gradient")


def test_inference_computes_the_same(pool):
    pool.run(inference, world=2)
    pool.run(inference, world=4)


def calls():
    """Count the Python functions that a forward runs, which no other load disturbs; the benchmark has the times."""
    counts = []
    for only in (True, False):
        model = shard(build(), inference_only=only).eval()
        for mode in (torch.no_grad, torch.enable_grad):
            profile = cProfile.Profile()
            with mode():
                model(batch())
                profile.runcall(model, batch())
            counts.append(sum(entry.callcount for entry in profile.getstats()))
    return counts


def test_inference_does_less(pool):
    only, only_with_grad, both, both_with_grad = pool.run(calls, world=2)[0]
    assert only < both
    assert only_with_grad < both_with_grad


# What a policy does in its own way.


class Attentive(TinyPolicy):
    reason = None

    def flash_attention(self, device_type, *, asked):
        if self.reason:
            raise NotSupportedError(self.reason)
        return SetAttribute(path="model", name="checkpoint", value=f"{device_type}, {asked}")


def test_flash_attention_is_the_policys():
    plan = compile_plan(Attentive, build(), ShardConfig.of(tp=2, enable_flash_attention=True), device_type="cuda")
    assert SetAttribute(path="model", name="checkpoint", value="cuda, True") in plan.steps
    assert [str(choice) for choice in plan.choices] == ["enable_flash_attention: checkpoint = 'cuda, True'"]


def test_flash_attention_that_is_impossible():
    class Without(Attentive):
        reason = "the moon is full"

    (problem,) = problems_of(policy=Without, enable_flash_attention=True)
    assert problem == (
        "(the model itself): flash attention is impossible: the moon is full\n"
        "    rule: ShardConfig.enable_flash_attention=True\n"
        "    next: mend that, or say enable_flash_attention='auto' to use it wherever it is possible"
    )
    plan = plan_of(policy=Without, enable_all_optimization=True)
    assert "enable_flash_attention: off: the moon is full" in plan.render()
    (problem,) = problems_of(enable_flash_attention=True)
    assert "TinyPolicy knows no other attention for its model" in problem


def test_choices_are_part_of_the_plan():
    plain, auto = plan_of(), plan_of(enable_all_optimization=True)
    assert plain.choices == ()
    assert plain.digest != auto.digest


class Reading(TinyPolicy):
    extra_kwargs = frozenset({"window"})

    def module_policy(self):
        assert self.shard_config.extra_kwargs.get("window", 3) == 3
        return super().module_policy()


def test_extra_settings_reach_the_policy():
    assert plan_of(policy=Reading, extra_kwargs={"window": 3})
    (problem,) = problems_of(policy=Reading, extra_kwargs={"window": 3, "widnow": 4})
    assert problem.startswith("(the model itself): Reading does not read it; what it reads: window")
    (problem, _) = problems_of(extra_kwargs={"window": 3, 1: 2})
    assert problem.startswith("(the model itself): TinyPolicy does not read it; what it reads: none")


def test_a_plan_keeps_its_resolved_configuration():
    config = plan_of().config
    assert (config.tensor_parallel_size, config.data_parallel_size, config.enable_flash_attention) == (2, 1, False)
