"""fp16: all ranks skip a step together, and a scale outlives its process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from boosted import batches, criterion, for_each, labelled, whole
from tiny import TinyPolicy, build

from shardcore.errors import NotSupportedError
from shardcore_shardformer import Booster, HybridParallelPlugin


def overflows(axes: dict[str, Any]) -> None:
    """Every rank skips a step that overflows, and takes it with a smaller scale."""
    torch.manual_seed(0)
    model = build(layers=4, dtype=torch.float32)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plugin = HybridParallelPlugin(
        precision="fp16", initial_scale=2.0**40, backoff_factor=2.0**-30, growth_interval=2, max_norm=1.0,
        custom_policy=TinyPolicy, **axes,
    )  # fmt: skip
    booster = Booster(plugin=plugin)
    booster.boost(model, optimizer)
    scales, losses = [], []
    torch.manual_seed(0)
    reference = build(layers=4, dtype=torch.float32)
    replica = dist.get_rank() if "zero_stage" in axes else 0
    for calls in zip(batches(0), batches(1), strict=True):
        mean = [criterion(reference(**call), call) for call in (calls if "zero_stage" in axes else calls[:1])]
        (sum(mean) / len(mean)).backward()
        break
    true = torch.nn.utils.get_total_norm([p.grad for p in reference.parameters() if p.grad is not None])
    for _ in range(4):
        data = batches(replica)
        losses.append(float(booster.execute_pipeline(data, model, criterion, optimizer)["loss"]))
        optimizer.step()
        stepping = model._shardcore_boosted
        scales.append((stepping.scale, stepping.skipped))
        if len(scales) == 1:
            assert all(torch.equal(whole(p), before[name]) for name, p in model.named_parameters())
            assert not any(optimizer.state.values())
        if len(scales) == 2:
            assert abs(float(stepping.norm / true) - 1) < 0.02
        optimizer.zero_grad()
    assert scales == [(2.0**10, 1), (2.0**10, 1), (2.0**11, 1), (2.0**11, 1)]
    assert losses[0] == losses[1] > losses[2] > losses[3], losses
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (scales, losses if "zero_stage" not in axes else []))
    assert all(other == told[0] for other in told)


def kept(folder: str) -> None:
    def made_new() -> tuple[Booster, Any, Any]:
        model = build(layers=4, dtype=torch.float32)
        optimizer = torch.optim.AdamW(model.parameters())
        plugin = HybridParallelPlugin(
            precision="fp16", initial_scale=16.0, growth_interval=2, tp_size=2, custom_policy=TinyPolicy
        )
        booster = Booster(plugin)
        booster.boost(model, optimizer)
        return booster, model, optimizer

    booster, model, optimizer = made_new()
    for number in range(3):
        booster.execute_pipeline(iter([labelled(number, 4)]), model, optimizer=optimizer)
        optimizer.step()
    booster.save_optimizer(optimizer, f"{folder}/optimizer")
    scale = model._shardcore_boosted.state_dict()
    assert scale == {"scale": 32.0, "since": 1}
    booster, model, optimizer = made_new()
    booster.load_optimizer(optimizer, f"{folder}/optimizer")
    assert model._shardcore_boosted.state_dict() == scale


def test_a_scale_is_kept(pool, tmp_path):
    pool.run(kept, str(tmp_path), world=2)


@for_each({"pp_size": 2}, {"tp_size": 2}, {"zero_stage": 1})
def test_half_precision_skips_together(pool, options):
    pool.run(overflows, options, world=2)


def closes(options: dict[str, Any]) -> None:
    model = build(layers=4, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plugin = HybridParallelPlugin(tp_size=2, custom_policy=TinyPolicy, **options)
    booster = Booster(plugin)
    booster.boost(model, optimizer)
    call, before = labelled(0, 4), {name: whole(p).clone() for name, p in model.named_parameters()}

    def closure() -> Any:
        loss = model(**call)
        booster.backward(loss, optimizer)
        return loss

    if options:
        with pytest.raises(NotSupportedError, match="call it before"):
            optimizer.step(closure)
        assert all(torch.equal(whole(p), before[name]) for name, p in model.named_parameters())
    else:
        optimizer.step(closure)
        assert not all(torch.equal(whole(p), before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("options", [{"max_norm": 1e-3}, {"precision": "fp16"}, {}], ids=str)
def test_a_closure_is_refused(pool, options):
    """Where gradients are unscaled or clipped before the step, in which the closure computes them."""
    pool.run(closes, options, world=2)
