"""Pipelines and the training engine with the models of the first four packs: they train as the whole models do."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardcore
from shardcore.pipeline import SCHEDULES
from shardcore.pipeline.microbatches import rows_of
from shardcore_shardformer import Booster, HybridParallelPlugin
from shardcore_testing.islands import no_float32_islands
from shardcore_testing.parity import whole

pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def float64_throughout() -> Iterator[None]:
    with no_float32_islands():
        yield


FOUR = {"num_hidden_layers": 4}
#: A case of each pack's conformance kit, and how its model gets four blocks.
FAMILIES = {
    "llama": ("causal_lm", FOUR),
    "bert": ("masked_lm", FOUR),
    "vit": ("image_classification", FOUR),
    "whisper": ("speech_to_text", {"encoder_layers": 2, "decoder_layers": 2}),
}
STEPS, PARTS = 5, 4
QUICK = {"1f1b", "interleaved", "zbv"}


def case_of(family: str) -> Any:
    cases = importlib.import_module(f"shard_{family}.cases").cases()
    return next(case for case in cases if case.name == FAMILIES[family][0])


def made(family: str, **more: Any) -> Any:
    """Return the tiny model of a pack's own cases."""
    model = case_of(family).build(**FAMILIES[family][1], **more).double()
    model.config.use_cache = False
    return model


def batches(family: str, model: Any, step: int, replica: int = 0) -> list[dict[str, Any]]:
    """Return the batches of a step, one or two that are accumulated; micro-batches differ in their padding."""
    step += 100 * replica
    inputs = case_of(family).inputs
    return [
        joined([inputs(model, PARTS * (10 * step + number) + part) for part in range(PARTS)])
        for number in range(1 + step % 2)
    ]


def joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    rows = rows_of(parts[0])
    return {
        name: torch.cat([part[name] for part in parts])
        if isinstance(value, Tensor) and value.ndim and value.size(0) == rows
        else value
        for name, value in parts[0].items()
    }


def loss_of(model: Any, batch: Mapping[str, Any], share: float) -> Tensor:
    """Run forward and backward of the whole model on the whole batch, and return its loss."""
    loss = model(**batch).loss
    (loss * share).backward()
    return loss.detach()


def adamw(model: Any) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def trains(family: str, options: dict[str, Any]) -> None:
    reference, model = made(family), made(family)
    (ours, schedule), (theirs, other) = adamw(model), adamw(reference)
    plugin = HybridParallelPlugin(num_microbatches=PARTS, max_norm=0.1, **options)
    replicas, replica = plugin.replicas, dist.get_rank() // plugin.tp_size % plugin.replicas
    booster = Booster(plugin)
    booster.boost(model, ours, None, None, schedule)
    names = dict(reference.named_parameters(remove_duplicate=False))
    for step in range(STEPS):
        for calls in zip(*(batches(family, reference, step, number) for number in range(replicas)), strict=True):
            batch, wanted = calls[replica], [loss_of(reference, call, 1 / replicas) for call in calls][replica]
            got = booster.execute_pipeline(iter([batch]), model, optimizer=ours)["loss"]
            assert abs(float(got - wanted)) <= 1e-12 * max(1.0, float(wanted.abs())), (step, float(got), float(wanted))
        scale = max(float(p.grad.abs().max()) for p in names.values() if p.grad is not None)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if names[name].grad is not None:
                error = float((whole(parameter.grad) - names[name].grad).abs().max()) / scale
                assert error <= 1e-12, (name, error)
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        assert abs(float(model._shardcore_boosted.norm - norm)) <= 1e-12 * float(norm)
        schedule.step()
        other.step()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        torch.testing.assert_close(whole(parameter), names[name].detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "schedule", [name if name in QUICK else pytest.param(name, marks=pytest.mark.nightly) for name in SCHEDULES]
)
def test_llama_in_every_schedule(pool, schedule):
    pool.run(trains, "llama", {"pp_size": 2, "pp_style": schedule}, world=2)


@pytest.mark.nightly
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
@pytest.mark.parametrize("family", ["bert", "vit", "whisper"])
def test_other_families(pool, family, schedule):
    pool.run(trains, family, {"pp_size": 2, "pp_style": schedule}, world=2)


@pytest.mark.parametrize("family", FAMILIES)
def test_with_tensor_parallelism(pool, family):
    pool.run(trains, family, {"pp_size": 2, "tp_size": 2, "enable_sequence_parallelism": True, "sp_size": 2}, world=4)


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_pipeline(pool, family):
    pool.run(trains, family, {"tp_size": 2}, world=2)


def counts_later_labels(options: dict[str, Any]) -> None:
    """A row whose only label is its first has none in a loss of later tokens, and comes first and last."""
    reference, model = made("llama"), made("llama")
    model.load_state_dict(reference.state_dict())
    batch = dict(joined([case_of("llama").inputs(reference, part) for part in range(2)]))
    batch["labels"] = batch["input_ids"].clone()
    for row in (0, -1):
        batch["labels"][row, 1:] = -100
    optimizer, booster = adamw(model)[0], Booster(HybridParallelPlugin(microbatch_size=1, max_norm=1.0, **options))
    booster.boost(model, optimizer)
    found = booster.execute_pipeline(iter([batch]), model, None, optimizer)["loss"]
    wanted = reference(**batch).loss
    wanted.backward()
    torch.testing.assert_close(found, wanted.detach())
    held = dict(model.named_parameters())
    for name, parameter in reference.named_parameters():
        if name in held:
            torch.testing.assert_close(whole(held[name].grad), parameter.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("options", [{"tp_size": 2, "zero_stage": 0, "parallel_output": True}, {"pp_size": 2}], ids=str)
def test_micro_batches_whose_only_label_does_not_count(pool, options):
    pool.run(counts_later_labels, options, world=2)


def drops(family: str) -> list[list[float]]:
    """Return the losses with dropout, under one schedule twice and under another."""
    found = []
    for schedule in ("1f1b", "1f1b", "gpipe"):
        model = made(family, dropout=0.3)
        booster = Booster(HybridParallelPlugin(pp_size=2, num_microbatches=PARTS, pp_style=schedule))
        optimizer, _ = adamw(model)
        booster.boost(model, optimizer)
        shardcore.manual_seed(model, 7)
        losses = []
        for step in range(2):
            (batch,) = batches(family, model, 2 * step)
            losses.append(float(booster.execute_pipeline(iter([batch]), model, optimizer=optimizer)["loss"]))
            optimizer.step()
            optimizer.zero_grad()
        found.append(losses)
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_dropout_is_reproduced(pool, family):
    for once, again, other in pool.run(drops, family, world=2):
        assert once == again == other
        assert once[0] != once[1]
