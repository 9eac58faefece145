"""What the tests of this pack share: policies, twins, and training beside the unsharded model."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import torch
import torch.distributed as dist
import transformers
from packaging.requirements import Requirement
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

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


def checkpointing(model: Any, kind: dict[str, Any] | None) -> None:
    """Turn gradient checkpointing on, or off with None, by the name that this transformers has for it."""
    prefix = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    if kind is None:
        getattr(model, f"{prefix}_checkpointing_disable")()
    else:
        getattr(model, f"{prefix}_checkpointing_enable")(kind)


def equal_on_ranks(tensor: Tensor) -> bool:
    """Tell whether all ranks hold bit-equal tensors."""
    mine = tensor.detach().contiguous()
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    return all(torch.equal(parts[0], part) for part in parts)


class Collectives(TorchDispatchMode):
    """Counts collectives, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # so that what DTensor does inside is seen
        self.count += func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.name()
        return func(*args, **(kwargs or {}))

    def take(self) -> int:
        """Return the number of collectives since the last time, and start again."""
        count, self.count = self.count, 0
        return count


class Operations(TorchDispatchMode):
    """Keeps the names of the collectives, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))
