"""Infers the policy of one class of transformers, in a process of its own: ``python -m shardcore_scaffold.infer``.

Standard input is an object of JSON: ``module`` and ``name`` of the class, the ``config`` as JSON text, and whether the
policy is to be ``proved``. The last line of standard output is one too: ``source``, ``doubts``, ``split`` (the share of
the parameters of a model of this configuration), ``whole`` (the largest parts that are not split, with their shares),
``proof`` (what was compared, in words), or ``error``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from shardcore.errors import ConfigError, ShardcoreError
from shardcore_scaffold.calls import like
from shardcore_scaffold.draft import Draft, plan_of, source
from shardcore_scaffold.guess import guess
from shardcore_scaffold.small import Small, config_of, small_model
from shardcore_testing.cases import Case, Supports
from shardcore_testing.checks import examine
from shardcore_testing.findings import Finding
from shardcore_testing.islands import in_float64
from shardcore_testing.pool import WorkerPool
from shardcore_testing.subject import Subject
from shardcore_testing.tiny_models import weighted_mean

_RANKS = 2
#: A section of the kit that a policy can do without -> the argument of `guess`, and what is left out, in words.
_LEFT_OUT = {
    "sequence": ("sequences", "no sequence parallelism"),
    "captured": ("captured", "attention weights and hidden states are refused"),
}
_LIMIT = 300  # seconds for the proof
#: Parts that are whole: how many are named, and from which share of a model's parameters on.
_NAMED, _WORTH_A_NAME = 3, 0.01


def answer(module: str, name: str, config: str, *, proved: bool) -> dict[str, Any]:
    """Return what the module's docstring says.

    Raises:
        ShardcoreError: no policy fits, nothing can be split, or the proof failed.
    """
    small = _small(module, name, config)

    def call(model: nn.Module) -> Any:
        return model(**small.inputs)

    def guessed(**options: bool) -> Draft:
        draft = guess(small.model, call, **options)
        if small.left_out:
            draft.stages = {}
            draft.doubts.append(
                "compared with text alone, since no call is known with "
                f"{small.left_out}: what only those reach is whole, and there are no stages of a pipeline"
            )
        return draft

    try:
        draft = guessed()
    except ShardcoreError:
        raise
    except Exception as error:
        raise ConfigError(
            f"what a small {name} computes could not be followed: {type(error).__name__}: {error}. Draft a policy from "
            "an example, and complete it: shardcore new-pack NAME --example module:function"
        ) from error
    proof, problems = "", dict[str, str]()
    if proved and draft.packs:  # what packs say holds of all, or it is found out anew
        with contextlib.suppress(ConfigError):
            proof, problems = _proof(module, name, config, draft, small.inputs)
        if problems or not proof:
            draft, proof = guessed(delegated=False), ""
    split = _split(small.model, draft)
    if not split:
        raise ConfigError(f"nothing of a small {name} could be split: {'; '.join(dict.fromkeys(draft.doubts))}")
    if proved and not proof:
        proof, problems = _proof(module, name, config, draft, small.inputs)
        if problems:  # the same without what differs
            draft = guessed(delegated=False, **{_LEFT_OUT[section][0]: False for section in problems})
            draft.doubts += [f"{_LEFT_OUT[section][1]}: {problem}" for section, problem in problems.items()]
    found, whole = shares(type(small.model), config, split)
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


def _split(model: nn.Module, draft: Draft) -> set[str]:
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


@in_float64()
def _proof(module: str, name: str, config: str, draft: Draft, inputs: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Return what was compared, in words, and how what it can do without differs, by section of the kit.

    Raises:
        ConfigError: training differs.
    """
    cls = getattr(importlib.import_module(module), name)
    further = [*(["sequence"] if draft.sequence else []), *(["captured"] if draft.captured else [])]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "shardcore_inferred_policy.py").write_text(source(cls, draft))
        sys.path.insert(0, folder)  # which the ranks take over
        case = Case(
            name=name,
            build=functools.partial(build, module, name, config),
            inputs=functools.partial(like, inputs),
            loss=loss_of,
            policy=f"shardcore_inferred_policy:{name}Policy",
            supports=Supports(sequence="sequence" in further, captured=draft.captured),
        )
        subject = Subject(case=case, tp=_RANKS)
        with WorkerPool(_RANKS, collective_timeout=120.0) as pool:
            findings = examine(pool, subject, "training", timeout=_LIMIT)
            if not _problem(findings):
                found = {section: examine(pool, subject, section, timeout=_LIMIT) for section in further}
    if problem := _problem(findings):
        raise ConfigError(
            f"the policy that was inferred for {name} is not exact on {_RANKS} ranks: {problem}. Write one from a "
            "draft: shardcore new-pack"
        )
    problems = {section: problem for section, part in found.items() if (problem := _problem(part))}
    right = [section for section in found if section not in problems]
    compared = [*findings, *(finding for section in right for finding in found[section])]
    errors = [finding.error for finding in compared if finding.error is not None]
    ways = f"{_RANKS} ranks{', tokens split and not' if 'sequence' in right else ''}"
    worst = f"{max(errors, default=0.0):.0e}"
    return f"outputs, loss, gradients and optimizer steps of a small copy on {ways}, largest error {worst}", problems


def _problem(findings: Sequence[Finding]) -> str:
    """Return the first failure, what was not reached because of it last; empty if there is none."""
    failed = [finding for finding in findings if finding.state == "failed"]
    failed.sort(key=lambda finding: finding.message.startswith("not reached"))
    return f"{failed[0].check}: {failed[0].message}" if failed else ""


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
