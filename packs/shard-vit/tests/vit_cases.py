"""Training beside the unsharded model: what the tests of this pack share."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor

from shard_vit.cases import cases
from shardcore_testing import pack
from shardcore_testing.cases import Case
from shardcore_testing.pack import policy_of, shard_by
from shardcore_testing.parity import (
    assert_close,
    assert_gradients_own_storage,
    assert_same_gradients,
    assert_same_parameters,
)
from shardcore_testing.subject import adamw

PLUGIN = "shard_vit.plugin"
policy = functools.partial(policy_of, PLUGIN)
shard = functools.partial(shard_by, PLUGIN)


def case(name: str) -> Case:
    """Return the case of this name."""
    return next(each for each in cases() if each.name == name)


def loss_of(case: Case, out: Any) -> Tensor:
    """Return the loss of an output."""
    return case.loss(out) if callable(case.loss) else out[case.loss]


def step_beside(case: Case, reference: Any, sharded: Any, seed: int, **call: Any) -> None:
    """Run both on one batch of a case, compare everything they return, and run both backwards."""
    loss = functools.partial(loss_of, case)
    pack.step_beside(reference, sharded, case.inputs(reference, seed), loss, **call)


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
