"""Training beside the unsharded model: what the tests of this pack share."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable
from typing import Any

import importlib_metadata
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardcore
from shard_vit.cases import cases
from shardcore.registry import GROUP, Registry
from shardcore.testing.cases import Case
from shardcore.testing.parity import (
    assert_close,
    assert_gradients_own_storage,
    assert_same_gradients,
    assert_same_parameters,
)
from shardcore.testing.subject import adamw


@functools.cache
def registry() -> Registry:
    """Return what this pack alone offers; packs are not installed while they are developed."""
    return Registry.discover([importlib_metadata.EntryPoint(name="vit", value="shard_vit.plugin", group=GROUP)])


def policy(model: nn.Module | type[nn.Module]) -> Any:
    """Return the policy that discovery finds for a model, or for its class."""
    return registry().resolve(model if isinstance(model, type) else type(model)).load()


def shard(model: Any, **options: Any) -> Any:
    """Shard ``model``; over all ranks along ``tp`` unless told otherwise."""
    return shardcore.shard(model, policy=policy(model), **(options or {"tp": dist.get_world_size()}))


def case(name: str) -> Case:
    """Return the case of this name."""
    return next(each for each in cases() if each.name == name)


def loss_of(case: Case, out: Any) -> Tensor:
    """Return the loss of an output."""
    return case.loss(out) if callable(case.loss) else out[case.loss]


def tensors(out: Any) -> Iterable[tuple[str, Tensor]]:
    """Return the tensors of an output with their names."""
    if isinstance(out, Tensor):
        return [("output", out)]
    if isinstance(out, tuple):
        return [(str(i), t) for i, t in enumerate(out)]
    return [(name, t) for name, t in out.items() if isinstance(t, Tensor)]


def step_beside(case: Case, reference: Any, sharded: Any, seed: int, **call: Any) -> None:
    """Run both, compare everything they return, and run both backwards."""
    inputs = case.inputs(reference, seed)
    wanted, got = reference(**inputs, **call), sharded(**inputs, **call)
    assert type(wanted) is type(got)
    for (name, mine), (same, theirs) in zip(tensors(wanted), tensors(got), strict=True):
        assert name == same
        assert not isinstance(theirs, DTensor)
        assert_close(mine, theirs, name)
    for out in (wanted, got):
        loss_of(case, out).backward()


def train_beside(case: Case, reference: Any, sharded: Any, steps: int = 2) -> None:
    """Train both on the same micro-batches, two in each step; everything is compared in every step."""
    both = (reference, sharded)
    optimizers = [adamw(m) for m in both]
    for step in range(steps):
        for micro in range(2):
            step_beside(case, reference, sharded, 10 * step + micro)
        assert_same_gradients(reference, sharded)
        norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.05) for m in both]
        assert_close(norms[0], norms[1], "gradient norm")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_parameters(reference, sharded)


def one_image_beside(case: Case, reference: Any, sharded: Any) -> None:
    """Accumulate three backwards of one image, and clip: the tokens' gradients are then views of the positions'."""
    both = (reference, sharded)
    for seed in range(3):
        inputs = {name: t[:1] for name, t in case.inputs(reference, seed).items()}
        for model in both:
            loss_of(case, model(**inputs)).backward()
    assert_gradients_own_storage(sharded)
    assert_same_gradients(reference, sharded)
    norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.05) for m in both]
    assert_close(norms[0], norms[1], "gradient norm")
    assert_same_gradients(reference, sharded)


def pair(case: Case, **options: Any) -> tuple[Any, Any]:
    """Return an unsharded model and its sharded twin."""
    reference = case.build(**options)
    return reference, shard(copy.deepcopy(reference))
