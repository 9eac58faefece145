"""What the census compares on each of two ranks: a model sharded in one way after another, beside the unsharded one."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from shardcore import from_pretrained, shard
from shardcore.errors import ShardcoreError

__all__ = ["BOUND", "WAYS", "Compared", "answer_of_rank", "loss_of"]

RANKS = 2
BOUND = 1e-10  # of the largest entry: what is larger is a difference and no rounding
_MASKED = 1e100  # logits that are larger mask something: their weighted sum is no number
_GREEDY = {"do_sample": False, "num_beams": 1, "max_new_tokens": 3, "min_new_tokens": 3}


@dataclass(frozen=True)
class Compared:
    """One class: what both ranks hold.

    Attributes:
        model: small, in float64, unsharded.
        inputs: of one call.
        policy: an inferred one; None where a pack serves the class.
        folder: one that both ranks see.
    """

    model: nn.Module
    inputs: Mapping[str, Any]
    policy: Any
    folder: Path

    @property
    def saved(self) -> Path:
        """Where the unsharded model is saved, if transformers can."""
        return self.folder / "whole"

    def fresh(self) -> tuple[Any, dict[str, Any]]:
        """Return a model that nothing was done to, and inputs that a call may change."""
        return copy.deepcopy(self.model), copy.deepcopy(dict(self.inputs))


def loss_of(out: Any) -> Tensor:
    """Return a weighted sum of all that a model returned, its own loss included."""
    generator = torch.Generator().manual_seed(5)
    leaves = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    weights = [torch.randn(leaf.shape, generator=generator, dtype=torch.float64) for leaf in leaves]
    leaves = [leaf.double().clamp(-_MASKED, _MASKED) for leaf in leaves]
    return torch.stack([(leaf * weight).mean() for leaf, weight in zip(leaves, weights, strict=True)]).sum()


def _first_loss(out: Any) -> Tensor:
    """Return the same of what the last stage of a pipeline knows: the loss of the model, else the first output."""
    return loss_of(next(leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.is_floating_point()))


class DifferenceError(Exception):
    """What was computed is not what the unsharded model computes: by how much of the largest entry."""

    def __init__(self, what: str, error: float = math.inf) -> None:
        super().__init__(what)
        self.error = error


def answer_of_rank(rank: int, compared: Compared) -> dict[str, Any]:
    """Return what a class comes to on this rank: its ``state`` at tp 2, and what it comes to in each further way."""
    store = dist.FileStore(str(compared.folder / "store"), RANKS)  # type: ignore[attr-defined]  # not said to be exported
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    found = _tensor_parallel(compared)
    if found["state"] == "exact":
        found["ways"] = {way: _tried(run, compared) for way, run in WAYS.items()}
    return found


def _tried(run: Callable[[Compared], str], compared: Compared) -> str:
    """Return "exact", another word where there is nothing to compare, or why not."""
    try:
        return run(compared)
    except DifferenceError as error:
        return f"differs: {error}"
    except ShardcoreError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"failed: {type(error).__name__}: {error}"


def _tensor_parallel(compared: Compared) -> dict[str, Any]:
    model, inputs = compared.fresh()
    try:
        sharded = shard(model, tp=RANKS, policy=compared.policy)
    except ShardcoreError as error:
        return {"state": "refused", "reason": str(error)}
    got = loss_of(sharded(**inputs))
    got.backward()
    try:
        largest = _error(*compared.fresh(), sharded, got)
    except DifferenceError as difference:
        return {"state": "differs", "reason": str(difference), "error": difference.error}
    return {"state": "exact", "error": largest, **_shares(compared.model, sharded)}


def _shares(model: nn.Module, sharded: nn.Module) -> dict[str, Any]:
    """Return the share of the parameters, and of those of attention modules, of which a rank holds a part."""
    held, sizes = dict(sharded.named_parameters(remove_duplicate=False)), Counter[str]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        part = own.to_local() if isinstance(own := held[name], DTensor) else own
        kind = "attention" if "att" in name.lower() else "rest"
        sizes[kind] += parameter.numel()
        sizes[f"{kind} split"] += parameter.numel() * (part.numel() < parameter.numel())
    split, attention = sizes["attention split"] + sizes["rest split"], sizes["attention"]
    return {
        "split": split / (attention + sizes["rest"]),
        "attention": sizes["attention split"] / attention if attention else None,
    }


def _error(
    reference: nn.Module,
    inputs: Mapping[str, Any],
    sharded: nn.Module,
    loss: Tensor,
    loss_of: Callable[[Any], Tensor] = loss_of,
) -> float:
    """Return the largest error of the loss and of all gradients that this rank has; raise if one differs."""
    wanted = loss_of(reference(**inputs))
    wanted.backward()
    errors = {"loss": _largest((loss.detach() - wanted.detach()) / wanted.detach().abs().clamp_min(1.0))}
    whole = dict(reference.named_parameters(remove_duplicate=False))
    scale = max((_largest(p.grad) for p in whole.values() if p.grad is not None), default=0.0) or 1.0
    for name, own in sharded.named_parameters(remove_duplicate=False):
        grad, theirs = own.grad.full_tensor() if isinstance(own.grad, DTensor) else own.grad, whole[name].grad
        if (grad is None) != (theirs is None):
            raise DifferenceError(f"{name}: one has a gradient, and the other has none")
        if grad is not None and theirs is not None:
            errors[name] = _largest(grad - theirs) / scale
    worst = max(errors, key=errors.__getitem__)
    if errors[worst] > BOUND:
        raise DifferenceError(f"{worst} is off by {errors[worst]:.0e}", errors[worst])
    return errors[worst]


def _largest(tensor: Tensor) -> float:
    """Return the largest absolute value, which is infinite if there is no number."""
    return float(tensor.abs().max().nan_to_num(nan=torch.inf)) if tensor.numel() else 0.0


def _sequence(compared: Compared) -> str:
    model, inputs = compared.fresh()
    sharded = shard(model, tp=RANKS, policy=compared.policy, enable_sequence_parallelism=True)
    loss = loss_of(sharded(**inputs))
    loss.backward()
    _error(*compared.fresh(), sharded, loss)
    return "exact"


def _pipeline(compared: Compared) -> str:
    model, inputs = compared.fresh()
    sharded: Any = shard(model, pp=RANKS, policy=compared.policy, num_microbatches=1)
    loss = sharded.train_step(inputs, loss=lambda out, _: _first_loss(out))
    _error(*compared.fresh(), sharded, loss, _first_loss)
    return "exact"


def _lazy(compared: Compared) -> str:
    """Read the parts of a saved model, each rank its own."""
    if not compared.saved.exists():
        return ""  # transformers itself does not save it
    kind: Any = type(compared.model)
    options: dict[str, Any] = {"dtype": torch.float64, "attn_implementation": "eager"}
    if any(getattr(getattr(m, "config", None), "_experts_implementation", None) for m in compared.model.modules()):
        options["experts_implementation"] = "eager"  # the default multiplies in no float64
    native = kind.from_pretrained(compared.saved, **options).train(compared.model.training)  # with buffers of its own
    try:
        copy.deepcopy(native)(**compared.fresh()[1])
    except Exception:
        return ""  # transformers itself reads what it cannot call in float64
    sharded = from_pretrained(kind, compared.saved, tp=RANKS, policy=compared.policy, **options)
    loss = loss_of(sharded.train(compared.model.training)(**compared.fresh()[1]))
    loss.backward()
    _error(native, compared.fresh()[1], sharded, loss)
    return "exact"


def _save(compared: Compared) -> str:
    """Save a sharded model: the library reads from it what it reads from the unsharded one's files."""
    if not compared.saved.exists():
        return ""
    sharded: Any = shard(compared.fresh()[0], tp=RANKS, policy=compared.policy)
    sharded.save_pretrained(compared.folder / "parts")
    wanted, got = (
        type(compared.model).from_pretrained(folder, dtype=torch.float64).state_dict()  # type: ignore[attr-defined]
        for folder in (compared.saved, compared.folder / "parts")
    )
    if off := [name for name in wanted if name not in got or not torch.equal(wanted[name], got[name])]:
        raise DifferenceError(f"{off[0]} and {len(off) - 1} more are read otherwise")
    return "exact"


def _generation(compared: Compared) -> str:
    if not getattr(compared.model, "can_generate", lambda: False)():
        return ""
    model, inputs = compared.fresh()
    prompt = {name: value for name, value in inputs.items() if name != "labels" and not name.startswith("decoder_")}
    try:
        wanted = copy.deepcopy(model).generate(**copy.deepcopy(prompt), **_GREEDY)
    except Exception:
        return ""  # transformers itself cannot with these inputs
    got = shard(model, tp=RANKS, policy=compared.policy).generate(**prompt, **_GREEDY)
    wanted, got = (getattr(out, "sequences", out) for out in (wanted, got))
    if not torch.equal(got, wanted) if not wanted.is_floating_point() else _largest(got - wanted) > BOUND:  # sound
        raise DifferenceError("other tokens than the unsharded model's")
    return "exact"


#: What is tried beside plain tensor parallelism, by the names of the columns.
WAYS: dict[str, Callable[[Compared], str]] = {
    "sequence": _sequence,
    "pipeline": _pipeline,
    "lazy": _lazy,
    "save": _save,
    "generate": _generation,
}
