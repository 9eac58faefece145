"""What is particular to timm's vision transformers: fused queries, keys and values, norms on them, DropPath, DeiT."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from vit_cases import case, one_image_beside, pair, policy, shard, step_beside, train_beside

import shardcore
from shard_vit.cases import images
from shardcore.comm.dtensor_params import local_tensor
from shardcore_testing import weighted_mean
from shardcore_testing.parity import assert_close, assert_same_gradients, assert_same_parameters, equal_on_ranks

timm = pytest.importorskip("timm")


def _refusal(options: dict[str, Any]) -> str:
    model = case("timm_plain").build(**options)
    with pytest.raises(shardcore.PlanError) as caught:
        shardcore.compile_plan(policy(model), model, shardcore.ShardConfig(tensor_parallel_size=2))
    assert len(caught.value.problems) == 1  # what would not fit either is not listed for each block
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attn_layer": "diff"}, r"differential attention \(attn_layer='diff'\) splits its heads"),
        ({"block_fn": "ParallelScalingBlock"}, "its blocks are none of Block, ResPostBlock"),
        ({"block_fn": "ParallelThingsBlock"}, "its blocks are none of Block, ResPostBlock"),
        ({"mlp_layer": "GatedMlp"}, "its MLPs are none of Mlp, GluMlp, SwiGLU"),
    ],
    ids=lambda value: next(iter(value.values())) if isinstance(value, dict) else "",
)
def test_what_cannot_be_split_is_refused(options, message):
    text = _refusal(options)
    assert re.search(message, text)
    assert "nothing was changed" in text


def _one_image(name: str, options: dict[str, Any]) -> None:
    each = case(name)
    one_image_beside(each, *pair(each, **options))


@pytest.mark.parametrize(("name", "options"), [("timm_plain", {"reg_tokens": 2}), ("timm_distilled", {})])
def test_one_image(pool, name, options):
    pool.run(_one_image, name, options, world=2)


def test_heads_that_do_not_divide():
    model = case("timm_plain").build(num_heads=3)
    with pytest.raises(shardcore.PlanError, match=r"3 heads \(attn.num_heads\) cannot be split over 2 ranks"):
        shardcore.compile_plan(policy(model), model, shardcore.ShardConfig(tensor_parallel_size=2))


#: Models that are refused: a part of their names, and why.
REFUSED = {
    "_xp_|_18x2_|_pwee_|_dpwee_": "its blocks are none of Block, ResPostBlock",
    "_dwee_|_dlittle_": "its attention is not timm's Attention",
}


@pytest.mark.parametrize("module", ["vision_transformer", "deit", "eva", "beit"])
def test_every_model_of_timm_has_a_plan_or_is_refused(module):
    names = timm.list_models(module=module)
    assert names
    for name in names:
        with torch.device("meta"):
            model = timm.create_model(name, **({} if "sapiens2" in name else {"depth": 2}))  # its heads go by depth
        heads = next(m.num_heads for m in model.modules() if hasattr(m, "num_heads"))
        ranks = next(n for n in (2, 3, 5, 7, 11, 13) if heads % n == 0)
        config = shardcore.ShardConfig(tensor_parallel_size=ranks)
        refused = [why for part, why in REFUSED.items() if re.search(part, name)]
        if refused:
            with pytest.raises(shardcore.PlanError, match=refused[0]):
                shardcore.compile_plan(policy(model), model, config)
        else:
            shardcore.compile_plan(policy(model), model, config)


def test_three_ranks_and_real_sizes(pool):
    pool.run(_three, world=3)


def _three() -> None:
    each = case("timm_registers")
    reference, model = pair(each, num_heads=6)
    train_beside(each, reference, model, steps=1)
    # deit_tiny: 197 tokens and the one of the teacher, 3 heads.
    each = case("timm_distilled")
    options = {"img_size": 224, "patch_size": 16, "embed_dim": 192, "num_heads": 3, "mlp_ratio": 4.0}
    reference, model = pair(each, **options)
    step_beside(each, reference, model, 0)
    assert_same_gradients(reference, model)


# --- H9: a fused weight that another number of ranks reads ---------------------------------------------------------


def test_checkpoints_of_fused_weights_fit_any_number_of_ranks(pool, tmp_path):
    for name in ("timm_plain", "timm_gated_in_one"):
        pool.run(_save, name, str(tmp_path / name), world=2)
        for world in (4, 1):
            pool.run(_load, name, str(tmp_path / name), world=world)


def _made(name: str, seed: int, sharded: bool) -> tuple[Any, torch.optim.Optimizer]:
    # Segments of 37 features divide by no number of ranks.
    model = case(name).build(seed=seed, **({"mlp_ratio": 74 / 48} if name == "timm_gated_in_one" else {}))
    if sharded:
        shard(model)
    # Far above rounding errors, by which alone a parameter without a true gradient (a key's bias) would move else.
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-4)


def _train(name: str, model: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    each = case(name)
    for step in steps:
        each.loss(model(**each.inputs(model, step))).backward()
        optimizer.step()
        optimizer.zero_grad()


def _save(name: str, folder: str) -> None:
    model, optimizer = _made(name, 0, sharded=True)
    assert isinstance(model.blocks[0].attn.qkv.weight, DTensor)
    _train(name, model, optimizer, range(2))
    states = get_state_dict(model, optimizer)
    dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=folder)


def _load(name: str, folder: str) -> None:
    model, optimizer = _made(name, 1, sharded=dist.get_world_size() > 1)
    states = get_state_dict(model, optimizer)
    into = {"model": states[0], "optimizer": states[1]}
    dcp.load(into, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=into["model"], optim_state_dict=into["optimizer"])
    reference, wanted = _made(name, 0, sharded=False)
    _train(name, reference, wanted, range(2))
    assert_same_parameters(reference, model)
    _train(name, reference, wanted, range(2, 3))
    _train(name, model, optimizer, range(2, 3))
    assert_same_parameters(reference, model)


def test_data_parallel(pool):
    pool.run(_square, world=4)


def _square() -> None:
    each = case("timm_registers")
    reference = each.build()
    model = shard(copy.deepcopy(reference), tp=2, dp=2)
    inputs = each.inputs(reference, 0)
    each.loss(reference(**inputs)).backward()
    each.loss(model(**inputs)).backward()  # FSDP2 takes the mean over replicas, which see the same here
    assert_same_gradients(reference, model)


# --- parameters that local heads read, and those that every rank reads whole ---------------------------------------


def test_gradients_of_norms_on_queries_and_keys_are_summed(pool):
    pool.run(_qk_norm, world=2)


def _qk_norm() -> None:
    each = case("timm_registers")
    reference, model = pair(each)
    for seed in (0, 1):  # H2: reduced once for each backward
        step_beside(each, reference, model, seed)
    assert_same_gradients(reference, model)
    for wanted, block in zip(reference.blocks, model.blocks, strict=True):
        for name in ("q_norm", "k_norm"):
            norm = getattr(block.attn, name)
            assert_close(getattr(wanted.attn, name).weight.grad, norm.weight.grad, name)
            assert norm.weight.grad.to_local().abs().max() > 1e-5
        for scale in (block.ls1, block.ls2):
            assert equal_on_ranks(local_tensor(scale.gamma.grad))
            assert scale.gamma.grad.full_tensor().abs().max() > 1e-3


# --- randomness ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [False, True], ids=["whole", "split"])  # split, all of a block draws by rank
def test_paths_are_dropped_on_all_ranks_alike(pool, tokens):
    pool.run(_drop_path, tokens, world=2)


def _drop_path(tokens: bool) -> None:
    torch.manual_seed(100 + dist.get_rank())  # H40
    model = case("timm_plain").build(depth=3, drop_path_rate=0.5, attn_drop_rate=0.3, proj_drop_rate=0.3)
    model = shard(model, enable_sequence_parallelism=tokens)
    dropped = []
    for block in model.blocks:
        for path in (block.drop_path1, block.drop_path2):
            if not isinstance(path, nn.Identity):
                path.register_forward_hook(lambda module, args, out: dropped.append((out == 0).all(-1).all(-1)))
    masks = []
    for seed in range(3):
        weighted_mean(model(images(16, seed, rows=8))).backward()
        masks.append(torch.stack(dropped))
        dropped.clear()
        assert equal_on_ranks(masks[-1].to(torch.int8))
    assert masks[0].shape == (4, 8)
    assert 0 < sum(int(mask.sum()) for mask in masks) < 3 * 4 * 8
    assert not torch.equal(masks[0], masks[1])
    for name, parameter in model.named_parameters():
        if parameter.placements[0].is_replicate():
            assert equal_on_ranks(local_tensor(parameter.grad)), name


# --- other ways to use a model -------------------------------------------------------------------------------------


def test_distillation(pool):
    pool.run(_distilled, world=2)


def _distilled() -> None:
    each = case("timm_distilled")
    reference, model = pair(each)
    for m in (reference, model):
        m.set_distilled_training()
    for seed in (0, 1):
        wanted, got = (m(**each.inputs(m, seed)) for m in (reference, model))
        for mine, theirs in zip(wanted, got, strict=True):  # of the class and of the distillation token
            assert_close(mine, theirs, "logits")
        for out in (wanted, got):
            weighted_mean(*out).backward()
    assert_same_gradients(reference, model)
    assert type(model).__name__ == "VisionTransformerDistilled"


def test_checkpointing_recomputes(pool):
    pool.run(_checkpointing, world=2)


def _checkpointing() -> None:
    each = case("timm_registers")
    reference, model = pair(each)
    model.set_grad_checkpointing()
    calls = []
    model.blocks[0].mlp.fc1.register_forward_hook(lambda *args: calls.append(1))
    for seed in (0, 1):
        step_beside(each, reference, model, seed)
    assert len(calls) == 4  # H16: each block ran twice for each batch
    assert_same_gradients(reference, model)


def test_bfloat16(pool):
    pool.run(_bfloat16, world=2)


def _bfloat16() -> None:
    for name in ("timm_registers", "timm_gated_in_one"):
        reference = case(name).build().to(torch.bfloat16)
        model = shard(copy.deepcopy(reference))
        outs = [m(images(16, 0).bfloat16()) for m in (reference, model)]
        assert_close(*outs, "logits", 0.03)
        for out in outs:
            weighted_mean(out.float()).backward()
        assert {p.grad.dtype for p in model.parameters()} == {torch.bfloat16}
        assert_same_gradients(reference, model, 0.05)


def test_other_sizes_of_images(pool):
    pool.run(_dynamic, world=2)


def _dynamic() -> None:
    each = case("timm_plain")
    reference, model = pair(each, dynamic_img_size=True)
    for size in (16, 24):
        wanted, got = (m(images(size, 1)) for m in (reference, model))
        assert_close(wanted, got, "logits")
        for out in (wanted, got):
            weighted_mean(out).backward()
    assert_same_gradients(reference, model)


# --- calls that are no forward -------------------------------------------------------------------------------------


def _features(model: Any, x: Any) -> tuple[Any, ...]:
    return (model.forward_features(x),)


def _head(model: Any, x: Any) -> tuple[Any, ...]:
    return (model.forward_head(model.forward_features(x)), model.forward_head(model.forward_features(x), True))


def _intermediates(model: Any, x: Any) -> tuple[Any, ...]:
    last, each = model.forward_intermediates(x, norm=True)
    return (last, *each, *model.forward_intermediates(x, indices=1, stop_early=True, intermediates_only=True))


def _layers(model: Any, x: Any) -> tuple[Any, ...]:
    return tuple(model.get_intermediate_layers(x, n=2, norm=True))


def _between_forwards(model: Any, x: Any) -> tuple[Any, ...]:
    before = model(x)
    with pytest.raises((RuntimeError, AssertionError)):
        model.forward_features(x[:, :2])
    features = model.forward_features(x)
    return (before, features, model(x))


WAYS = (_features, _head, _intermediates, _layers, _between_forwards)
SETTINGS: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2},
    "tokens": {"tp": 2, "enable_sequence_parallelism": True},
    "dp": {"tp": 1, "dp": 2},
    "tp-dp": {"tp": 2, "dp": 2},
    "tokens-dp": {"tp": 2, "dp_replicate_size": 2, "enable_sequence_parallelism": True},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_features_without_a_forward(pool, setting):
    pool.run(_called, SETTINGS[setting], world=4 if "tp-dp" in setting or "tokens-dp" in setting else 2)


def _called(options: dict[str, Any]) -> None:
    for name in ("timm_plain", "timm_registers", "timm_distilled"):
        for way in WAYS:
            reference = case(name).build()
            model = shard(copy.deepcopy(reference), **options)
            try:
                for seed in range(2):
                    wanted, got = (way(m, images(16, seed)) for m in (reference, model))
                    for mine, theirs in zip(wanted, got, strict=True):
                        assert_close(mine, theirs, "features")
                    for out in (wanted, got):
                        weighted_mean(*out).backward()
                assert_same_gradients(reference, model)
            except Exception as error:
                error.add_note(f"{name} {way.__name__}")
                raise
            assert isinstance(model.pos_embed, DTensor)


def test_masks_of_features_come_from_the_models_stream(pool):
    pool.run(_masked_features, world=2)


def _masked_features() -> None:
    torch.manual_seed(100 + dist.get_rank())
    model = shard(case("timm_plain").build(pos_drop_rate=0.3, drop_rate=0.2)).train()
    users = torch.get_rng_state()
    tokens = torch.ones(3, 17, 48, dtype=torch.float64)
    for run, x in (
        (model.forward_features, images(16, 0)),
        (model.get_intermediate_layers, images(16, 0)),
        (model.forward_head, tokens),
    ):
        outs = []
        for _ in range(2):
            shardcore.manual_seed(model, 5)
            outs.append(torch.cat([t.flatten() for t in run(x)]))
        assert equal_on_ranks(outs[0])
        assert torch.equal(*outs)
    assert torch.equal(torch.get_rng_state(), users)
