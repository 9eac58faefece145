"""A call or a backward that is cut short, or only evaluates, between a backward and a step of the optimizer.

FSDP2 would keep what it has gathered, and the next forward compute with parameters from before the step.
"""

from __future__ import annotations

import copy
from pipes import LAYERS, close, labelled
from typing import Any

import pytest
import torch
from needs import PIPELINES
from tiny import TinyPolicy, build

import shardcore
from shardcore.errors import ShardcoreWarning
from shardcore.mesh.context import context_of
from shardcore_testing.parity import assert_same_gradients

WAYS = {
    "sharded": {"dp": 2},
    "kept": {"dp": 2, "wrap": {"reshard_after_forward": False}},
    "replicated": {"dp_replicate_size": 2},
}
STAGED = {"1f1b": {"dp": 2, "pp": 2}, "zbv": {"dp": 2, "pp": 2, "pipeline_schedule": "zbv"}}
KINDS = ("evaluation", "no backward", "forward", "forward without gradients", "backward")


class CutShortError(Exception):
    """What a hook raises."""


def _raises(*_: Any) -> None:
    raise CutShortError


def _raises_backward(module: Any, inputs: Any, out: Any) -> None:
    if out.requires_grad:
        out.register_hook(_raises)


def _between(model: Any, run: Any, kind: str) -> None:
    """Do what an optimizer knows nothing of, which leaves it its parameters."""
    held = {name: id(parameter) for name, parameter in model.named_parameters()}
    _do(model, run, kind)
    if kind not in ("no backward", "backward"):  # until the next call
        assert {name: id(parameter) for name, parameter in model.named_parameters()} == held


def _do(model: Any, run: Any, kind: str) -> None:
    if kind in ("evaluation", "no backward"):
        with torch.set_grad_enabled(kind == "no backward"):
            run()
        return
    hook = _raises_backward if kind == "backward" else _raises
    handle = model.model.layers[1].register_forward_hook(hook)
    with torch.set_grad_enabled(kind != "forward without gradients"), pytest.raises(CutShortError):
        run()
    handle.remove()


def trains(fields: dict[str, Any], kind: str, *, zeroed: bool) -> None:
    reference = build(layers=LAYERS)
    model: Any = shardcore.shard(copy.deepcopy(reference), policy=TinyPolicy, **fields)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (reference, model)]
    staged, replica = "pp" in fields, context_of(model).replica

    def step(seed: int) -> torch.Tensor:
        call = labelled(seed)
        if staged:
            return model.train_step(call)
        loss = model(**call)
        loss.backward()
        return loss.detach()

    for seed in range(3):
        if zeroed:
            _between(model, lambda: step(9), kind)
            optimizers[1].zero_grad()
        wanted, got = reference(**labelled(seed)), step(seed)
        wanted.backward()
        close(wanted, got, f"loss of step {seed} of replica {replica}")
        if not zeroed:
            _between(model, lambda: model.eval_step(labelled(9)) if staged else model(**labelled(9)), kind)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:a backward of .* was cut short")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_before_a_step(pool, way, kind):
    pool.run(trains, WAYS[way], kind, zeroed=kind == "backward", world=2)


@PIPELINES
@pytest.mark.parametrize("way", STAGED)
def test_an_evaluation_of_stages(pool, way):
    pool.run(trains, STAGED[way], "evaluation", zeroed=False, world=4)


def accumulates() -> None:
    """What was accumulated without sums is gone with a backward that was cut short, and that is said."""
    model: Any = shardcore.shard(build(layers=LAYERS), policy=TinyPolicy, dp=2)
    model.set_requires_gradient_sync(False)
    model(**labelled(0)).backward()
    _do(model, lambda: model(**labelled(1)).backward(), "backward")
    with pytest.warns(ShardcoreWarning, match=r"a backward of \w+ was cut short.*begin the accumulation"):
        loss = model(**labelled(2))
    model.set_requires_gradient_sync(True)
    loss.backward()
    reference = build(layers=LAYERS)
    reference(**labelled(2)).backward()
    assert_same_gradients(reference, model)


def test_an_accumulation_that_is_cut_short(pool):
    pool.run(accumulates, world=2)


def norms() -> None:
    """The norm of gradients is that of all, also after a forward whose backward is to come."""
    model: Any = shardcore.shard(build(layers=LAYERS), policy=TinyPolicy, dp=2)
    model(**labelled(0)).backward()
    wanted = shardcore.grad_norm(model)
    loss = model(**labelled(1))
    close(wanted, shardcore.grad_norm(model), "norm")
    loss.backward()
    reference = build(layers=LAYERS)
    for seed in range(2):
        reference(**labelled(seed)).backward()
    assert_same_gradients(reference, model)


def test_the_norm_after_a_forward(pool):
    pool.run(norms, world=2)


def forwards(fields: dict[str, Any]) -> None:
    reference = build(layers=LAYERS)
    model: Any = shardcore.shard(copy.deepcopy(reference), policy=TinyPolicy, **fields)
    for m in (reference, model):
        (m(**labelled(0)) + m(**labelled(1))).backward()
    assert_same_gradients(reference, model)


@pytest.mark.parametrize("way", WAYS)
def test_two_forwards_before_a_backward(pool, way):
    pool.run(forwards, WAYS[way], world=2)
