"""Infers the policy of one class of transformers, in a process of its own: ``python -m shardcore_scaffold.infer``.

Standard input is an object of JSON: ``module`` and ``name`` of the class, the ``config`` as JSON text, and whether the
policy is to be ``proved``. The last line of standard output is one too: ``source``, ``doubts``, ``split`` (the share of
the parameters of a model of this configuration), ``whole`` (the largest parts that are not split, with their shares),
``proof`` (what was compared, in words), or ``error``.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
import sys
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from shardcore.errors import ConfigError, ShardcoreError
from shardcore_scaffold.calls import like
from shardcore_scaffold.draft import Draft, plan_of, source
from shardcore_scaffold.facts import Facts
from shardcore_scaffold.guess import guess
from shardcore_scaffold.proof import Made, settled
from shardcore_scaffold.small import Small, config_of, small_model
from shardcore_testing.cases import Case, Supports
from shardcore_testing.islands import in_float64
from shardcore_testing.tiny_models import weighted_mean

_RANKS = 2
_PROVED = ("training", "sequence", "captured")  # sections of the kit
#: Parts that are whole: how many are named, and from which share of a model's parameters on.
_NAMED, _WORTH_A_NAME = 3, 0.01


def answer(module: str, name: str, config: str, *, proved: bool) -> dict[str, Any]:
    """Return what the module's docstring says.

    Raises:
        ShardcoreError: no policy fits, nothing can be split, or the proof failed.
    """
    small = _small(module, name, config)

    try:
        facts = Facts(small.model, lambda model: model(**small.inputs))
        draft, proof = guess(facts), ""
    except ShardcoreError:
        raise
    except Exception as error:
        raise ConfigError(
            f"what a small {name} computes could not be followed: {type(error).__name__}: {error}. Draft a policy from "
            "an example, and complete it: shardcore new-pack NAME --example module:function"
        ) from error
    if not split_names(small.model, draft):
        raise ConfigError(f"nothing of a small {name} could be split: {'; '.join(dict.fromkeys(draft.doubts))}")
    if proved:
        draft, proof = _proof(facts, functools.partial(_case, module, name, config, small.inputs))
    if small.left_out:
        draft.stages = {}
        draft.doubts.append(
            "compared with text alone, since no call is known with "
            f"{small.left_out}: what only those reach is whole, and there are no stages of a pipeline"
        )
    found, whole = shares(type(small.model), config, split_names(small.model, draft))
    text = source(type(small.model), draft)
    return {"source": text, "doubts": draft.doubts, "split": found, "whole": whole, "proof": proof}


def build(module: str, name: str, config: str, **options: Any) -> nn.Module:
    """Return the small model of a class, in the process of a rank; it draws nothing in training."""
    model = _small(module, name, config).model.train()
    for inner in model.modules():
        if isinstance(inner, nn.Dropout):
            inner.p = 0.0  # of heads, whose configuration does not say it
    return model


def _small(module: str, name: str, config: str) -> Small:
    cls = getattr(importlib.import_module(module), name)
    try:
        return small_model(cls, config_of(cls, config))
    except ConfigError as error:
        raise ConfigError(
            f"{str(error).rstrip('.')}. Draft a policy from a small model and a call of your own: shardcore new-pack "
            "NAME --example module:function"
        ) from error


def split_names(model: nn.Module, draft: Draft) -> set[str]:
    """Return the names of the parameters that a draft splits, with ``N`` for all numbers."""
    return {
        _alike(p.name) for p in plan_of(model, draft).parameters if p.layout and not p.layout.placement.is_replicate()
    }


def shares(cls: Any, config: str, split: Collection[str]) -> tuple[float, dict[str, float]]:
    """Return the share of a model's parameters that have these names, and of which modules the largest others are.

    The model of the configuration itself is built, without memory. Modules have ``N`` for all numbers.
    """
    with torch.device("meta"):
        model: nn.Module = cls(config_of(cls, config))
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    total, whole = sum(sizes.values()), Counter[str]()
    for name, size in sizes.items():
        if _alike(name) not in split:
            whole[_alike(name).rpartition(".")[0]] += size
    largest = {module: size / total for module, size in whole.most_common(_NAMED) if size / total > _WORTH_A_NAME}
    return 1 - whole.total() / total, largest


def _alike(name: str) -> str:
    return re.sub(r"\d+", "N", name)


def _case(
    module: str, name: str, config: str, inputs: Mapping[str, Any], folder: Path, unique: str, draft: Draft
) -> tuple[Case, str]:
    """Return the case of a small model, for `shardcore_scaffold.proof.settled`."""
    cls = getattr(importlib.import_module(module), name)
    own = unique.replace("-", "_")
    (folder / f"{own}.py").write_text(source(cls, draft))
    case = Case(
        name=name,
        build=functools.partial(build, module, name, config),
        inputs=functools.partial(like, inputs),
        loss=loss_of,
        policy=f"{own}:{name}Policy",
        supports=Supports(sequence=draft.sequence, captured=draft.captured),
    )
    return case, ""


@in_float64()
def _proof(facts: Facts, made: Made) -> tuple[Draft, str]:
    """Return a draft that is exact, and what was compared, in words.

    Raises:
        ConfigError: training differs, or nothing can be split without that.
    """
    found = settled(facts, made, only=_PROVED)
    if found.failed or not split_names(facts.model, found.draft):
        (check, said), *_ = (*found.failed.items(), ("nothing is split", "; ".join(found.draft.doubts)))
        raise ConfigError(
            f"the policy that was inferred for {type(facts.model).__name__} is not exact on {_RANKS} ranks: {check}: "
            f"{said}. Write one from a draft: shardcore new-pack"
        )
    ways = f"{_RANKS} ranks{', tokens split and not' if found.draft.sequence else ''}"
    worst = f"{found.error:.0e}"
    return found.draft, f"outputs, loss, gradients and optimizer steps of a small copy on {ways}, largest error {worst}"


def loss_of(out: Any) -> torch.Tensor:
    """Return the model's own loss, or a weighted mean of what it returned."""
    if isinstance(out, Mapping) and isinstance(out.get("loss"), torch.Tensor):
        found: torch.Tensor = out["loss"]
        return found
    leaves = [leaf for leaf in tree_flatten(out)[0] if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    return weighted_mean(*leaves)


def _main(asked: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return answer(asked["module"], asked["name"], asked["config"], proved=asked["proved"])
    except ShardcoreError as error:
        return {"error": str(error)}


if __name__ == "__main__":
    print(json.dumps(_main(json.load(sys.stdin))))
