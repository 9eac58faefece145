"""What the configuration's switches do to a Llama: flash attention, fused norms, recomputed layers, inference."""

from __future__ import annotations

import copy
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from llama_cases import batch, build, compare_forward, shard

import shardcore
from shard_llama.policy import LlamaPolicy
from shardcore.compile import compile_plan
from shardcore.config import ShardConfig
from shardcore.config.recomputation import GradientCheckpointConfig
from shardcore.errors import PlanError
from shardcore.nn import FusedRMSNorm
from shardcore_testing.parity import assert_close, assert_same_gradients
from shardcore_transformers import _attention
from shardcore_transformers._attention import ChooseAttention
from shardcore_transformers._checkpointing import RecomputeLayer


def _plan(model, device="cuda", **fields):
    return compile_plan(LlamaPolicy, model, ShardConfig.of(tp=2, **fields), device_type=device)


def _reason(model, device="cuda", asked=True):
    with pytest.raises(PlanError) as caught:
        _plan(model, device, enable_flash_attention=asked)
    (problem,) = caught.value.problems
    return problem.what.removeprefix("flash attention is impossible: ")


def _installed(*versions):
    return mock.patch.object(_attention, "_installed", return_value=list(versions or ("flash_attention_2",)))


def test_why_flash_attention_is_impossible():
    model = build(dtype=torch.bfloat16)
    assert _reason(model, "cpu") == "its kernels run on CUDA, and this is 'cpu'"
    with _installed():
        assert _reason(model, asked="flash_attention_4") == (
            "flash_attention_4 is not installed, or does not run on this card; what is and does: flash_attention_2"
        )
        assert _reason(build(dtype=torch.float64)) == (
            "it computes in float16 and bfloat16, and parameters are torch.float64 (load the model with "
            "dtype=torch.bfloat16)"
        )
        with mock.patch.multiple(type(model), _supports_flash_attn=False, _supports_sdpa=False):
            for asked in (True, "xformers"):
                assert _reason(model, asked=asked) == "transformers has none for LlamaForCausalLM (it stays at 'sdpa')"
    with pytest.raises(shardcore.ConfigError, match="'xformers' or None, got 'flash'"):
        _plan(model, enable_flash_attention="flash")


def test_without_flash_attn_torchs_own_kernels_are_taken():
    model = build(dtype=torch.bfloat16, attn_implementation="eager")
    with mock.patch.object(_attention, "_installed", return_value=[]):
        plan = _plan(model, enable_flash_attention=True)
    assert "enable_flash_attention: sdpa (the flash-attn package is not installed" in plan.render()


def test_the_newest_that_runs_on_a_card_is_taken():
    for card, there, best in ((8, "234", "2"), (9, "234", "4"), (10, "23", "2"), (10, "234", "4"), (7, "234", "")):
        with (
            mock.patch.object(torch.cuda, "get_device_capability", return_value=(card, 0)),
            mock.patch.object(_attention, "_is_there", lambda name, there=there: name[-1] in there),
        ):
            assert "".join(_attention._installed()[:1]) == (best and f"flash_attention_{best}")


@pytest.mark.parametrize("switch", [True, "auto"])
def test_flash_attention_where_it_is_possible(switch):
    with _installed("flash_attention_3"):
        plan = _plan(build(dtype=torch.bfloat16), enable_flash_attention=switch)
    assert ChooseAttention(path="", implementation="flash_attention_3") in plan.steps
    assert "enable_flash_attention: flash_attention_3" in plan.render()


def test_auto_takes_no_liberties():
    for options, reason in (
        ({"dtype": torch.float32}, "parameters are torch.float32"),
        ({"dtype": torch.bfloat16, "attn_implementation": "eager"}, "eager attention was chosen"),
    ):
        with _installed():
            plan = _plan(build(**options), enable_flash_attention="auto", enable_fused_normalization=False)
            assert not [step for step in plan.steps if isinstance(step, ChooseAttention)]
            (choice,) = plan.choices
            assert choice.outcome.startswith("off: ")
            assert reason in choice.outcome
            asked = _plan(build(**options), enable_flash_attention=True)
            assert [step for step in asked.steps if isinstance(step, ChooseAttention)]


def other_attention():
    """The way from the switch to another attention, with sdpa in the place of a kernel that this machine lacks."""
    reference = build(attn_implementation="eager", dtype=torch.float32)
    config = reference.config
    twin, sharded = type(reference)(config), type(reference)(config)
    sharded.load_state_dict(reference.state_dict())
    with _installed("sdpa"), mock.patch("shardcore.compile.compiler.device_type_here", return_value="cuda"):
        shard(sharded, tp=dist.get_world_size(), enable_flash_attention=True)
    assert sharded.config._attn_implementation == "sdpa"
    assert {m.config._attn_implementation for m in sharded.modules() if hasattr(m, "config")} == {"sdpa"}
    assert sharded.config is sharded.model.config is not config
    assert twin.config._attn_implementation == config._attn_implementation == "eager"
    compare_forward(reference, sharded, batch(reference), 1e-5)
    assert_same_gradients(reference, sharded, 1e-5)


def test_the_attention_of_one_model_is_changed(pool):
    pool.run(other_attention, world=2)


def fused_norms():
    reference = build(dtype=torch.float32)
    sharded = shard(copy.deepcopy(reference), tp=dist.get_world_size(), enable_fused_normalization=True)
    fused = [name for name, module in sharded.named_modules() if isinstance(module, FusedRMSNorm)]
    assert len(fused) == 5
    compare_forward(reference, sharded, batch(reference), 1e-5)
    assert_same_gradients(reference, sharded, 1e-5)


def test_fused_norms_compute_the_same(pool):
    pool.run(fused_norms, world=2)


def recomputed_layers():
    reference = build()
    kept = []
    for count in (0, 1):
        sharded = shard(
            copy.deepcopy(reference),
            tp=dist.get_world_size(),
            gradient_checkpoint_config=GradientCheckpointConfig(num_ckpt_layers=count),
        )
        assert [layer.gradient_checkpointing for layer in sharded.model.layers] == [True] * count + [False] * (
            2 - count
        )
        sharded.train()
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, sizes=sizes: sizes.append(t.numel()) or t, lambda t: t):
            loss = sharded(**batch(reference)).loss
        loss.backward()
        kept.append(sum(sizes))
        reference.zero_grad()
        reference(**batch(reference)).loss.backward()
        assert_same_gradients(reference, sharded)
    assert kept[1] < 0.8 * kept[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # renamed in transformers 5, and kept under its old name
        sharded.gradient_checkpointing_disable()
    assert not any(layer.gradient_checkpointing for layer in sharded.model.layers)


def test_layers_are_recomputed_by_transformers_own_means(pool):
    pool.run(recomputed_layers, world=2)


def test_recomputed_layers_are_in_the_plan():
    model = build()
    switch = GradientCheckpointConfig(gradient_checkpointing_ratio=1.0)
    steps = _plan(model, gradient_checkpoint_config=switch).steps
    assert [s.path for s in steps if isinstance(s, RecomputeLayer)] == ["model.layers.0", "model.layers.1"]
    model.model.layers[0] = torch.nn.Identity()
    with pytest.raises(PlanError, match=r"model\.layers\.0 is a Identity, which is no GradientCheckpointingLayer"):
        _plan(model, gradient_checkpoint_config=switch)


def inference():
    reference = build(use_cache=True).eval()
    sharded = shard(copy.deepcopy(reference).train(), tp=dist.get_world_size(), inference_only=True)
    inputs = {k: v for k, v in batch(reference, pads=(0,)).items() if k != "labels"}
    out = sharded(**inputs)
    assert out.logits.grad_fn is None
    assert_close(reference(**inputs).logits, out.logits, "logits")
    options = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(reference.generate(**inputs, **options), sharded.generate(**inputs, **options))


@pytest.mark.parametrize("world", [2, 4])
def test_inference_only(pool, world):
    pool.run(inference, world=world)


def test_all_optimizations_on_one_rank():
    reference = build(dtype=torch.float32)
    model = shardcore.shard(copy.deepcopy(reference), policy=LlamaPolicy, enable_all_optimization=True)
    assert isinstance(model.model.norm, FusedRMSNorm)
    assert model.config._attn_implementation == "sdpa"
    compare_forward(reference, model, batch(reference), 1e-5)
    assert_same_gradients(reference, model, 1e-5)


def test_a_decoder_of_ones_own_is_a_decoder():
    class Own(transformers.LlamaModel):
        pass

    model = build()
    model.model.__class__ = Own
    assert compile_plan(LlamaPolicy, model, ShardConfig.of(tp=2)).stages.lists == ("model.layers",)
