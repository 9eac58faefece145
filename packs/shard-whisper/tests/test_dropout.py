"""Dropout, dropped layers and masked features: ranks agree however they are seeded (H6, H40)."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor
from whisper_cases import CHECKPOINTS, build, compare, inputs, loss_of, pair, policy, shard

import shardcore
from shardcore_testing.parity import assert_close, assert_same_gradients, equal_on_ranks
from shardcore_testing.subject import checkpointing

DROPS = {"encoder_layerdrop": 0.4, "decoder_layerdrop": 0.4}
SPEC_AUGMENT = {
    "apply_spec_augment": True,
    "mask_time_prob": 0.4,
    "mask_time_length": 3,
    "mask_time_min_masks": 1,
    "mask_feature_prob": 0.3,
    "mask_feature_length": 2,
    "mask_feature_min_masks": 1,
}


def _seed() -> None:
    torch.manual_seed(dist.get_rank())
    np.random.seed(dist.get_rank())


@pytest.mark.nightly
@pytest.mark.parametrize("kind", CHECKPOINTS, ids=str)
def test_directional_derivative(pool, kind):
    pool.run(_directional, kind, world=2)


def _directional(kind: dict[str, Any] | None) -> None:
    model = build("WhisperForConditionalGeneration", dropout=0.2, **DROPS, **SPEC_AUGMENT).double().train()
    generator = torch.Generator().manual_seed(3)
    directions = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in model.parameters()]
    if kind:
        checkpointing(model, kind)
    shard(model)
    _seed()
    batch = inputs(model, 0)
    # No padding: its row of the embedding has no gradient, though the outputs depend on it.
    batch["labels"] = batch["labels"].clamp(min=3)
    state = shardcore.get_rng_state(model)

    def value() -> Tensor:
        shardcore.set_rng_state(model, state)
        return model(**{name: tensor.clone() for name, tensor in batch.items()}).logits.square().mean()

    learnt = [(p, v) for p, v in zip(model.parameters(), directions, strict=True) if p.requires_grad]
    moves = [(p, distribute_tensor(v, p.device_mesh, p.placements)) for p, v in learnt]
    value().backward()
    slope = sum((p.grad.full_tensor() * v).sum() for p, v in learnt if p.grad is not None).item()
    checkpointing(model, None)
    step, values = 1e-6, []
    for distance in (step, -2 * step):
        with torch.no_grad():
            for parameter, move in moves:
                parameter.add_(move, alpha=distance)
            values.append(value().item())
    measured = (values[0] - values[1]) / (2 * step)
    assert abs(slope - measured) <= 1e-6 * abs(slope), (slope, measured)


class _Calls:
    """Notes which layers run."""

    def __init__(self, model: Any) -> None:
        self.seen: list[str] = []
        for name, module in model.named_modules():
            layer, _, last = name.rpartition(".")
            if last == "self_attn_layer_norm":
                module.register_forward_hook(lambda *_, layer=layer: self.seen.append(layer))

    def take(self) -> list[str]:
        seen, self.seen = self.seen, []
        return seen


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_ranks_drop_the_same_layers(pool, dropout):
    (runs, *others) = pool.run(_dropped, dropout, world=2)
    assert all(other == runs for other in others)
    assert len({tuple(run) for run in runs}) > 4  # of the 16 ways to drop some of four layers


def _dropped(dropout: float) -> list[list[str]]:
    model = shard(build("WhisperForConditionalGeneration", dropout=dropout, **DROPS).double().train())
    _seed()
    calls, runs = _Calls(model), []
    for seed in range(10):
        loss = model(**inputs(model, seed)).loss
        runs.append(calls.take())
        loss.backward()
    assert all(equal_on_ranks(p.grad.full_tensor()) for p in model.parameters() if p.grad is not None)
    return runs


def test_replicas_that_would_drop_other_layers_are_refused():
    config = shardcore.ShardConfig(tensor_parallel_size=2, data_parallel_size=2)
    model = build("WhisperForConditionalGeneration", **DROPS)
    with pytest.raises(shardcore.PlanError) as caught:
        shardcore.compile_plan(policy(model), model, config)
    assert [problem.where for problem in caught.value.problems] == ["model.encoder", "model.decoder"]
    assert "every data-parallel replica would leave out other blocks" in str(caught.value)
    model = build("WhisperForConditionalGeneration")
    shardcore.compile_plan(policy(model), model, config)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", CHECKPOINTS, ids=str)
def test_gradients_with_dropped_layers(pool, kind):
    pool.run(_gradients, kind, world=2)


def _gradients(kind: dict[str, Any] | None) -> None:
    reference, model = pair(**DROPS)
    plain = build("WhisperForConditionalGeneration").double().train()
    plain.load_state_dict(reference.state_dict())
    _seed()
    if kind:
        checkpointing(model, kind)
    calls, stacks = _Calls(model), ("encoder", "decoder")
    whole = {stack: list(getattr(plain.model, stack).layers) for stack in stacks}
    for seed in range(6):
        batch = inputs(plain, seed)
        got = model(**batch)
        ran = calls.take()
        for stack in stacks:  # an unsharded model that has only the layers which ran
            layers = [m for i, m in enumerate(whole[stack]) if f"model.{stack}.layers.{i}" in ran]
            getattr(plain.model, stack).layers = nn.ModuleList(layers)
        wanted = plain(**batch)
        assert_close(wanted.logits, got.logits, "logits")
        for out in (wanted, got):
            out.loss.backward()
        calls.take()  # what is recomputed
    for stack in stacks:
        getattr(plain.model, stack).layers = nn.ModuleList(whole[stack])
    assert_same_gradients(plain, model)


@pytest.mark.parametrize("name", ["WhisperForConditionalGeneration", "WhisperModel"])
def test_spec_augment_masks_alike(pool, name):
    pool.run(_masked, name, world=2)


def _masked(name: str) -> None:
    reference, model = pair(name, **SPEC_AUGMENT)
    reference.config.apply_spec_augment = False
    _seed()
    users = np.random.get_state()[1].copy()
    heard: list[Tensor] = []
    encoder = model.get_encoder()
    encoder.conv1.register_forward_pre_hook(lambda _, args: heard.append(args[0].detach().clone()))
    shares = []
    for seed in range(4):
        batch = inputs(reference, seed)
        got = model(**{key: tensor.clone() for key, tensor in batch.items()})
        assert equal_on_ranks(heard[-1])
        shares.append((heard[-1] == 0).double().mean().item())
        wanted = reference(**{**batch, "input_features": heard[-1]})
        assert_close(loss_of(wanted), loss_of(got), "loss")
        loss_of(wanted).backward()
        loss_of(got).backward()
    assert_same_gradients(reference, model)
    assert all(0.1 < share < 0.9 for share in shares)
    assert not torch.equal(heard[0] == 0, heard[1] == 0)
    assert np.array_equal(np.random.get_state()[1], users)  # the user's own numbers are untouched
    model.eval()
    model(**batch)
    assert not (heard[-1] == 0).any()


def test_one_seed_gives_one_run(pool):
    pool.run(_reproducible, world=2)


def _reproducible() -> None:
    model = shard(build("WhisperForConditionalGeneration", dropout=0.1, **DROPS, **SPEC_AUGMENT).double().train())
    _seed()
    losses = []
    for _ in range(2):
        shardcore.manual_seed(model, 3)
        losses.append([model(**inputs(model, 0)).loss.item() for _ in range(3)])
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 3
    assert equal_on_ranks(torch.tensor(losses))


def test_training_without_dropout_after_training_with_it(pool):
    pool.run(_off, world=2)


def _off() -> None:
    reference = build("WhisperForConditionalGeneration", dropout=0.2, **DROPS, **SPEC_AUGMENT).double()
    model = shard(copy.deepcopy(reference).train())
    model(**inputs(model, 0)).loss.backward()
    model.zero_grad()
    compare(reference.eval(), model.eval())
    assert_same_gradients(reference, model)
