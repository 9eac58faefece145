"""What the tests of this pack share: policies, twins, and training beside the unsharded model."""

from __future__ import annotations

import copy
import functools
from typing import Any

import transformers
from torch import Tensor

from shard_bert.cases import build, inputs
from shardcore_testing import hidden_loss
from shardcore_testing.pack import policy_of, shard_by, step_beside

#: Attention that works in a float64 decoder with a mask on every release.
DECODER = {"is_decoder": True, "attn_implementation": "eager"}
CROSS = {**DECODER, "add_cross_attention": True}
OLD = transformers.__version__.startswith("4.")


PLUGIN = "shard_bert.plugin"
policy = functools.partial(policy_of, PLUGIN)
shard = functools.partial(shard_by, PLUGIN)


def pair(name: str, **options: Any) -> tuple[Any, Any]:
    """Return an unsharded model and its sharded twin."""
    reference = build(name, **options)
    return reference, shard(copy.deepcopy(reference))


def loss_of(out: Any) -> Tensor:
    """Return the model's loss, or one for the bare model."""
    return out.loss if "loss" in out else hidden_loss(out)


def compare(
    reference: Any, sharded: Any, *, seeds: tuple[int, ...] = (0, 1), tolerance: float = 1e-12, **call: Any
) -> None:
    """Run both on batches, compare the outputs and the loss, and run both backwards: gradients add up."""
    for seed in seeds:
        step_beside(reference, sharded, inputs(reference, seed), loss_of, tolerance=tolerance, **call)
