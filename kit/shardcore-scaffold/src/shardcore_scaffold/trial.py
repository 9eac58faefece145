"""Whether a policy fits a model: one rank of two that are not there runs a training step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from shardcore.api import shard
from shardcore.policy import Policy
from shardcore_planner.simulation import simulated_ranks


def misfit(
    model: nn.Module, policy: type[Policy], call: Callable[[nn.Module], Any], *, ranks: int = 2, **fields: Any
) -> str:
    """Return why a policy does not fit a small model, or an empty text; ``fields`` are those of `ShardConfig`.

    Compiling the policy, running the model with a rank's sizes and judging the way of its gradients
    (`shardcore.comm.gradients`) finds wrong names, sizes, views and entries. Values are not compared: collectives of
    ranks that are not there return what they are given.
    """
    sharded = copy.deepcopy(model)
    try:
        with simulated_ranks(ranks):
            sharded = shard(sharded, tp=ranks, policy=policy, **fields)
            for parameter in sharded.parameters():
                parameter.requires_grad_()
            total = sum(tensor.double().sum() for tensor in _fractions(call(sharded)))
            if isinstance(total, Tensor) and total.requires_grad:
                total.backward()
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return ""


def _fractions(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        if isinstance(value.get("loss"), Tensor):
            yield value["loss"]
            return
        for part in value.values():
            yield from _fractions(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _fractions(part)
