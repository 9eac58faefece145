"""What the tests of packs share beyond the kit: the policy of a pack that is not installed, and one step beside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardcore
from shardcore.policy import Policy
from shardcore_testing.parity import assert_close
from shardcore_testing.subject import flat, registry_of


def policy_of(plugin: str, model: nn.Module | type[nn.Module]) -> type[Policy]:
    """Return the policy that a plugin, which need not be installed, has for a model or for a class of models."""
    return registry_of(plugin).resolve(model if isinstance(model, type) else type(model)).load()


def shard_by(plugin: str, model: Any, **options: Any) -> Any:
    """Shard ``model`` by a plugin's policy, over all ranks along ``tp`` unless ``options`` of `shard` say otherwise."""
    return shardcore.shard(model, policy=policy_of(plugin, model), **(options or {"tp": dist.get_world_size()}))


def step_beside(
    reference: Any,
    sharded: Any,
    inputs: Mapping[str, Any],
    loss: Callable[[Any], Tensor],
    *,
    tolerance: float = 1e-12,
    **call: Any,
) -> None:
    """Call a model and its sharded copy, compare everything they return, and run both backwards: gradients add up.

    Args:
        reference: the unsharded model.
        sharded: its sharded copy.
        inputs: the arguments of both calls.
        loss: returns the loss, a single number, of what a model returned.
        tolerance: the largest difference, relative to the largest value of each tensor.
        **call: further arguments of both calls.

    Raises:
        AssertionError: they return something else.
    """
    wanted, got = reference(**inputs, **call), sharded(**inputs, **call)
    if type(wanted) is not type(got):
        raise AssertionError(f"a {type(got).__name__} was returned, not a {type(wanted).__name__}")
    mine, theirs = dict(flat(wanted)), dict(flat(got))
    if mine.keys() != theirs.keys():
        raise AssertionError(f"returned were {list(theirs)}, wanted {list(mine)}")
    for name, tensor in mine.items():
        if isinstance(theirs[name], DTensor):
            raise AssertionError(f"{name} is a DTensor")
        assert_close(tensor, theirs[name], name, tolerance)
    assert_close(loss(wanted), loss(got), "loss", tolerance)
    for out in (wanted, got):
        loss(out).backward()
