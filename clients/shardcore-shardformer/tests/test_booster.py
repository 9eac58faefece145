"""One script trains as the unsharded model does, whatever its plugin says; what cannot exist is refused."""

from __future__ import annotations

import copy
import dataclasses
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from boosted import LENGTH, STEPS, batches, criterion, for_each, labelled, whole
from needs import PIPELINES
from tiny import TinyLM, TinyPolicy, batch, build
from torch.utils.data import DataLoader

from shardcore.errors import AgreementError, ConfigError, NotSupportedError, PlanError
from shardcore_shardformer import Booster, HybridParallelPlugin, PipelineGradientCheckpointConfig, ShardFormer


def made(model: Any) -> tuple[torch.optim.Optimizer, Any]:
    groups = [{"params": model.head.parameters(), "lr": 3e-2}, {"params": model.model.parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def trained(replicas: int, max_norm: float) -> tuple[Any, list[list[float]], list[float]]:
    """Return the unsharded model after its training, the losses of all replicas, and the norms."""
    model = build(layers=4)
    optimizer, scheduler = made(model)
    losses, norms = [], []
    for calls in zip(*(batches(replica) for replica in range(replicas)), strict=True):
        found = [criterion(model(**call), call) for call in calls]
        (sum(found) / replicas).backward()
        losses.append([float(loss.detach()) for loss in found])
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm or float("inf"))))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model, losses, norms


def script(options: dict[str, Any]) -> None:
    """Train by one script; everything that it holds stays the object that it was."""
    plugin = HybridParallelPlugin(custom_policy=TinyPolicy, **options)
    replicas = dist.get_world_size() // (plugin.tp_size * plugin.pp_size)
    replica = dist.get_rank() // plugin.tp_size % replicas
    reference, losses, norms = trained(replicas, plugin.max_norm)
    model = build(layers=4)
    optimizer, scheduler = made(model)
    booster = Booster(plugin=plugin)
    given = (model, optimizer, criterion, None, scheduler)
    assert all(a is b for a, b in zip(given, booster.boost(*given), strict=True))
    data = batches(replica)
    for step in range(STEPS):
        out = booster.execute_pipeline(data, model, criterion, optimizer, return_loss=True, return_outputs=step == 0)
        assert abs(float(out["loss"]) - losses[step][replica]) <= 1e-12
        if step == 0:
            stage = dist.get_rank() // (plugin.tp_size * replicas)
            last = stage == (0 if plugin.pp_style == "zbv" else plugin.pp_size - 1)
            assert (out["outputs"] is not None) == last
            if out["outputs"] is not None:
                expected = build(layers=4)(**next(batches(replica)))
                torch.testing.assert_close(out["outputs"], expected.detach(), rtol=1e-11, atol=1e-11)
        optimizer.step()
        if plugin.max_norm:
            assert abs(float(model._shardcore_boosted.norm) - norms[step]) <= 1e-12 * max(norms)
        scheduler.step()
        optimizer.zero_grad()
    with pytest.raises(StopIteration):
        booster.execute_pipeline(data, model, criterion, optimizer)
    with torch.no_grad():
        found = booster.execute_pipeline(batches(), model, criterion, return_outputs="everywhere")
        evaluated, first = found["loss"], next(batches())
        torch.testing.assert_close(found["outputs"], reference(**first).detach(), rtol=1e-9, atol=1e-9)
        assert abs(float(evaluated) - float(criterion(reference(**first), first).detach())) <= 1e-10
    names = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(whole(parameter), names[name].detach(), rtol=1e-10, atol=1e-10)


@for_each(
    {"tp_size": 2, "pp_size": 2, "num_microbatches": 4, "max_norm": 0.1},
    {"pp_size": 2, "zero_stage": 1, "microbatch_size": 2, "max_norm": 0.1, "pp_style": "interleaved"},
    {"pp_size": 2, "zero_stage": 0, "num_microbatches": 4, "pp_style": "zbv", "max_norm": 0.1},
    {"pp_size": 2, "zero_stage": 3, "num_microbatches": 4},
    {"tp_size": 2, "zero_stage": 2, "num_microbatches": 2, "max_norm": 0.1},
    {"tp_size": 1, "zero_stage": 3, "max_norm": 0.1},
    {"tp_size": 4},
)
def test_one_script_for_every_mesh(pool, options):
    pool.run(script, options, world=4)


def own_losses(options: dict[str, Any]) -> None:
    """The model's own loss, of batches of any number of rows, and of micro-batches in which nothing counts."""
    plugin = HybridParallelPlugin(custom_policy=TinyPolicy, **options)
    replicas = dist.get_world_size() // (plugin.tp_size * plugin.pp_size)
    replica = dist.get_rank() // plugin.tp_size % replicas
    reference, model = build(layers=4), build(layers=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    booster = Booster(plugin=plugin)
    booster.boost(model, optimizer)
    for rows in (8, 7):
        calls = [labelled(10 * rows + number, rows) for number in range(replicas)]
        losses = [reference(**call) for call in calls]
        (sum(losses) / replicas).backward()
        got = booster.execute_pipeline(iter([calls[replica]]), model, optimizer=optimizer, return_outputs=False)
        assert got["outputs"] is None
        assert abs(float(got["loss"]) - float(losses[replica].detach())) <= 1e-12
    # Nothing counts on one replica, and it takes part all the same.
    nothing = {**labelled(0, 8), "labels": torch.full((8, LENGTH), -100)}
    call = nothing if replica else labelled(3, 8)
    (reference(**labelled(3, 8)) / replicas).backward()
    booster.execute_pipeline(iter([call]), model, optimizer=optimizer)
    names = dict(reference.named_parameters())
    scale = max(float(parameter.grad.abs().max()) for parameter in names.values())
    for name, parameter in model.named_parameters():
        assert float((whole(parameter.grad) - names[name].grad).abs().max()) <= 1e-12 * scale, name


@for_each(
    {"pp_size": 2, "num_microbatches": 4},
    {"pp_size": 2, "zero_stage": 3, "microbatch_size": 2},
    {"pp_size": 2, "tp_size": 2, "microbatch_size": 2, "pp_style": "interleaved"},
    {"zero_stage": 2, "microbatch_size": 2},
    {"zero_stage": 1, "num_microbatches": 4},
    {"tp_size": 2, "zero_stage": 0, "microbatch_size": 3},
    {"tp_size": 2, "pp_size": 2, "partial_gradients": "deferred", "num_microbatches": 4, "max_norm": 0.1},
)
def test_the_models_own_loss(pool, options):
    if options.get("partial_gradients") == "deferred":
        pool.run(deferred, options, world=4)
    else:
        pool.run(own_losses, options, world=4)


def deferred(options: dict[str, Any]) -> None:
    """Gradients that the plugin leaves partial are summed before the step."""
    reference, model = build(layers=4), build(layers=4)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-4) for m in (reference, model)]
    booster = Booster(plugin=HybridParallelPlugin(custom_policy=TinyPolicy, **options))
    booster.boost(model, optimizers[1])
    for seed in range(2):
        reference(**labelled(seed, 8)).backward()
        booster.execute_pipeline(iter([labelled(seed, 8)]), model, optimizer=optimizers[1])
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    names = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(whole(parameter), names[name].detach(), rtol=1e-10, atol=1e-10)


def data_fails(options: dict[str, Any]) -> None:
    """What fails on one rank while a batch is taken fails on all of them, and the next batch trains."""
    model = build(layers=4)
    optimizer = torch.optim.AdamW(model.parameters())
    booster = Booster(plugin=HybridParallelPlugin(custom_policy=TinyPolicy, num_microbatches=2, **options))
    booster.boost(model, optimizer)

    def broken() -> Any:
        if dist.get_rank() == 0:
            raise OSError("the disk is gone")
        yield labelled(0, 8)

    started = time.monotonic()
    with pytest.raises((OSError, AgreementError), match="the disk is gone"):
        booster.execute_pipeline(broken(), model, optimizer=optimizer)
    assert time.monotonic() - started < 1
    ends = iter([labelled(0, 8)] if dist.get_rank() else [])
    with pytest.raises((StopIteration, AgreementError)):
        booster.execute_pipeline(ends, model, optimizer=optimizer)
    fails = lambda out, inputs: out.missing  # noqa: E731
    with pytest.raises((AttributeError, AgreementError), match="has no attribute 'missing'"):
        booster.execute_pipeline(iter([labelled(0, 8)]), model, fails, optimizer)
    assert bool(booster.execute_pipeline(iter([labelled(0, 8)]), model, optimizer=optimizer)["loss"].isfinite())


@PIPELINES
class Logits(TinyLM):
    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super().forward(ids)


def summed(logits: torch.Tensor, call: Any) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), call["labels"].flatten(), reduction="sum") / 9


def by_hand(logits: torch.Tensor, call: Any) -> torch.Tensor:
    scores = logits.log_softmax(-1).gather(-1, call["labels"].clamp(min=0)[..., None])
    return -scores[..., 0].where(call["labels"] >= 0, 0.0).sum() / 9


@pytest.mark.parametrize("loss", [None, summed, by_hand], ids=lambda loss: getattr(loss, "__name__", "own"))
def test_labels_that_do_not_count_teach_nothing(loss):
    model = build()
    model.__class__ = TinyLM if loss is None else Logits
    optimizer = torch.optim.SGD(model.parameters())
    booster = Booster(plugin=HybridParallelPlugin(custom_policy=TinyPolicy, num_microbatches=1))
    booster.boost(model, optimizer)
    nothing = {**labelled(0, 4), "labels": torch.full((4, LENGTH), -100)}
    assert float(booster.execute_pipeline(iter([nothing]), model, loss, optimizer)["loss"]) == 0.0
    assert not any(bool(parameter.grad.any()) for parameter in model.parameters())


@PIPELINES
def test_a_rank_without_data(pool):
    pool.run(data_fails, {"pp_size": 2}, world=2)


def recomputed() -> None:
    """Each stage recomputes as many blocks as it is told to; a rank has no others."""
    reference, model = build(layers=4), build(layers=4)
    config = PipelineGradientCheckpointConfig(num_ckpt_layers_per_stage=[2, 1])
    plugin = HybridParallelPlugin(
        pp_size=2, num_microbatches=2, gradient_checkpoint_config=config, custom_policy=TinyPolicy
    )
    booster = Booster(plugin=plugin)
    booster.boost(model)
    calls = [0] * 4

    def count(block: int) -> Any:
        def counted(*_: Any) -> None:
            calls[block] += 1

        return counted

    for number, block in enumerate(model.model.layers):
        block.mlp.register_forward_pre_hook(count(number))
    data = labelled(0, 8)
    loss = booster.execute_pipeline(iter([data]), model)["loss"]
    assert abs(float(loss) - float(reference(**data).detach())) <= 1e-12
    assert calls == ([4, 4, 0, 0] if dist.get_rank() == 0 else [0, 0, 4, 2])
    for counts, said in (([2], "the stages have"), ([3, 1], "the stages have"), ([2, 2, 0], "the stages have")):
        wrong = PipelineGradientCheckpointConfig(num_ckpt_layers_per_stage=counts)
        with pytest.raises(PlanError, match=said):
            Booster(dataclasses.replace(plugin, gradient_checkpoint_config=wrong)).boost(build(layers=4))


@PIPELINES
def test_blocks_of_each_stage_are_recomputed(pool):
    pool.run(recomputed, world=2)


def schedulers(folder: str) -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    booster = Booster(plugin=HybridParallelPlugin())
    with pytest.raises((RuntimeError, AgreementError), match="nowhere"):
        booster.save_lr_scheduler(scheduler, f"{folder}/nowhere/scheduler.pt")
    with pytest.raises((FileNotFoundError, AgreementError)):
        booster.load_lr_scheduler(scheduler, f"{folder}/scheduler{dist.get_rank()}.pt")


def test_schedulers_that_cannot_be_kept(pool, tmp_path):
    pool.run(schedulers, str(tmp_path), world=2)


def own_loop() -> None:
    """Without a pipeline the loop of the user's runs as ever: accumulated, and clipped by the step."""
    reference = build(layers=2)
    model = copy.deepcopy(reference)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    booster = Booster(
        plugin=HybridParallelPlugin(zero_stage=1, max_norm=0.1, num_microbatches=2, custom_policy=TinyPolicy)
    )
    booster.boost(model, optimizer)
    other = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-4)
    calls = list(batches())
    with booster.no_sync(model, optimizer):
        booster.backward(criterion(model(**calls[0]), calls[0]), optimizer)
        booster.execute_pipeline(iter(calls[2:3]), model, criterion, optimizer)
        assert all(parameter.grad is None for parameter in model.parameters())  # FSDP2 has them, whole
    booster.backward(criterion(model(**calls[1]), calls[1]), optimizer)
    assert all(parameter.grad is not None for parameter in model.parameters())
    for call in calls[:3]:
        criterion(reference(**call), call).backward()
    torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    optimizer.step()
    other.step()
    for (name, wanted), got in zip(reference.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(whole(got), wanted.detach(), rtol=1e-10, atol=1e-10, msg=name)


def test_a_loop_without_a_pipeline(pool):
    pool.run(own_loop, world=2)


def resumed(folder: str) -> None:
    def fresh() -> tuple[Booster, Any, Any, Any]:
        model = build(layers=4)
        optimizer, scheduler = made(model)
        booster = Booster(HybridParallelPlugin(pp_size=2, num_microbatches=4, max_norm=0.1, custom_policy=TinyPolicy))
        booster.boost(model, optimizer, criterion, None, scheduler)
        return booster, model, optimizer, scheduler

    def go(booster: Booster, model: Any, optimizer: Any, scheduler: Any, data: Any, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            losses.append(float(booster.execute_pipeline(data, model, criterion, optimizer)["loss"]))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return losses

    booster, model, optimizer, scheduler = fresh()
    data = batches()
    go(booster, model, optimizer, scheduler, data, 2)
    booster.save_model(model, f"{folder}/model")
    booster.save_optimizer(optimizer, f"{folder}/optimizer")
    booster.save_lr_scheduler(scheduler, f"{folder}/scheduler.pt")
    wanted = go(booster, model, optimizer, scheduler, data, 2)
    booster, model, optimizer, scheduler = fresh()
    booster.load_model(model, f"{folder}/model")
    booster.load_optimizer(optimizer, f"{folder}/optimizer")
    booster.load_lr_scheduler(scheduler, f"{folder}/scheduler.pt")
    data = batches()
    next(data), next(data)
    assert go(booster, model, optimizer, scheduler, data, 2) == wanted


@PIPELINES
def test_a_training_is_resumed(pool, tmp_path):
    pool.run(resumed, str(tmp_path), world=2)


def misused() -> None:
    model = build(layers=4)
    optimizer = torch.optim.AdamW(model.parameters())
    booster = Booster(plugin=HybridParallelPlugin(pp_size=2, custom_policy=TinyPolicy))
    with pytest.raises(ConfigError, match="was not boosted"):
        booster.backward(torch.zeros(()), optimizer)
    booster.boost(model, optimizer)
    with pytest.raises(NotSupportedError, match="execute_pipeline runs the backward too"):
        booster.backward(torch.zeros(()), optimizer)
    with pytest.raises(NotSupportedError, match="call it several times"), booster.no_sync(model, optimizer):
        pass
    with pytest.raises(ConfigError, match="wants batches that are the arguments of a call by name, got a Tensor"):
        booster.execute_pipeline(iter([torch.zeros(2)]), model, criterion, optimizer)
    data = [{"ids": row} for row in batch(0, 8, LENGTH)]
    replicas = Booster(plugin=HybridParallelPlugin(custom_policy=TinyPolicy))
    untouched = build(layers=2)
    with pytest.raises(ConfigError, match="would give all 2 replicas the same batches"):
        replicas.boost(untouched, None, None, DataLoader(data, batch_size=4))
    replicas.boost(untouched)  # nothing had been changed
    former = ShardFormer(shard_config=replicas.plugin.config())
    loader = former.shard_dataset(data, batch_size=4)
    assert replicas.boost(build(layers=2), None, None, loader).dataloader is loader
    with pytest.raises(ConfigError, match="wants a HybridParallelPlugin"):
        Booster(plugin="hybrid")


@PIPELINES
def test_misuse(pool):
    pool.run(misused, world=2)
