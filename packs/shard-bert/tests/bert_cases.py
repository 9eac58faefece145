"""What the tests of this pack share: policies, twins, and training beside the unsharded model."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import torch.distributed as dist
import transformers
from packaging.requirements import Requirement
from torch import Tensor
from torch.distributed.tensor import DTensor

import shardcore
from shard_bert.cases import build, hidden_loss, inputs
from shard_bert.plugin import shardcore_policies
from shardcore.testing.parity import assert_close

#: What each class returns besides the loss.
OUTPUTS = ("last_hidden_state", "pooler_output", "logits", "prediction_logits", "seq_relationship_logits")
#: Attention that works in a float64 decoder with a mask on every release.
DECODER = {"is_decoder": True, "attn_implementation": "eager"}
CROSS = {**DECODER, "add_cross_attention": True}
OLD = transformers.__version__.startswith("4.")


def specs(name: str, version: str = transformers.__version__) -> list[str]:
    """Return the policies of the class ``name`` that count with a release of transformers."""
    found = []
    for spec in shardcore_policies():
        requirement = Requirement(spec.requires)
        if spec.target.endswith(f".{name}") and requirement.specifier.contains(version, prereleases=True):
            found.append(spec.policy)
    return found


def policy(model: Any) -> Any:
    """Return the pack's policy for the class of ``model``; packs are not installed while they are developed."""
    (reference,) = specs(type(model).__name__)
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def shard(model: Any, **options: Any) -> Any:
    """Shard ``model`` by the pack's policy; over all ranks along ``tp`` unless told otherwise."""
    return shardcore.shard(model, policy=policy(model), **(options or {"tp": dist.get_world_size()}))


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
        batch = inputs(reference, seed)
        wanted, got = reference(**batch, **call), sharded(**batch, **call)
        assert type(wanted) is type(got)
        for name in OUTPUTS:
            if wanted.get(name) is not None:
                assert not isinstance(got[name], DTensor)
                assert_close(wanted[name], got[name], name, tolerance)
        assert_close(loss_of(wanted), loss_of(got), "loss", tolerance)
        loss_of(wanted).backward()
        loss_of(got).backward()
