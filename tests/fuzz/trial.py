"""Carrying out one draw on one rank: the sharded model beside the unsharded one."""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import models
from compared import BOUND, Outcome, Record
from draws import Draw
from shardcore.errors import ShardcoreError
from shardcore.transfer import products
from shardcore_testing.islands import no_float32_islands
from surroundings import foreign, keys_left

__all__ = ["Outcome", "try_draw"]

#: What rounding in float32 makes.
_BOUND_FLOAT32 = 1e-3

#: Steps of some models make more of a rounding than `BOUND` (Zamba 2: 1e-10 after two of SGD). What the unsharded model
#: makes of one in each parameter, times this, is rounding too, up to the second number; asked where a draw differs.
_TIMES_OF_ROUNDING, _MOST_OF_ROUNDING = 10, 1e-8

#: Kind -> the training of the unsharded model, and that of the sharded one: a module and a class.
_KINDS = {
    "plain": ("called.Reference", "called.Run"),
    "pipeline": ("training.Whole", "pipelines.Pipelined"),
    "booster": ("training.Whole", "pipelines.Boosted"),
    "experts": ("training.Whole", "training.Sharded"),
    "adapters": ("adapted.AdaptedWhole", "adapted.Adapted"),
    "parts": ("training.Whole", "parts.Part"),
    "cases": ("cases.CaseWhole", "cases.CaseSharded"),
}


def try_draw(draw: Draw) -> Outcome:
    """Carry out a draw on this rank; called on each rank of a process group with as many as the draw wants."""
    products._ROWS = 4  # so that few tokens travel in several pieces
    outcome = Outcome(bound=BOUND if draw.dtype == "float64" else _BOUND_FLOAT32)
    of_whole, of_sharded = map(_class, _KINDS[draw.kind])
    model = _unsharded(lambda: _built(draw))
    if isinstance(model, str):
        return Outcome(state="unsharded", problems=[model])
    whole = of_whole(draw, copy.deepcopy(model))
    seen = of_whole(draw, copy.deepcopy(model))  # a call changes what norms over a batch remember
    before = foreign()
    outside = _unsharded(seen.forward)
    with no_float32_islands():
        inside, wanted = _unsharded(seen.forward), _unsharded(whole.records)
        for found in (outside, inside, wanted):
            if isinstance(found, str):
                return Outcome(state="unsharded", problems=[found])
        _same_but_for_rounding(outcome, outside, inside)
        run = of_sharded(draw, model)
        got = _refused(outcome, draw, run)
        if got is None:
            return outcome
        told = len(outcome.problems)
        _compare(outcome, wanted, got)
        if len(outcome.problems) > told and draw.dtype == "float64" and draw.how:
            bound = _TIMES_OF_ROUNDING * _of_rounding(of_whole, draw, wanted)
            del outcome.problems[told:]
            outcome.bound = min(max(BOUND, bound), _MOST_OF_ROUNDING)
            _compare(outcome, wanted, got)
        if draw.number % 4 == 0 and (left := keys_left(run.forward)):
            outcome.problems.append(f"eight forwards left in the store of the process group: {sorted(left)}")
    for name, value in foreign().items():
        if isinstance(value, type) or isinstance(before[name], type):
            if value is not before[name]:
                outcome.problems.append(
                    f"{name} of a DTensor of others: {value}, without a sharded model {before[name]}"
                )
        else:
            outcome.compare(f"{name} of a DTensor of others", before[name], value)
    outcome.state = "failed" if outcome.problems else "equal"
    return outcome


def _compare(outcome: Outcome, wanted: list[Record], got: list[Record]) -> None:
    for one, other in zip(wanted, got, strict=True):
        outcome.compare_records(one, other)


def _of_rounding(of_whole: Any, draw: Draw, wanted: list[Record]) -> float:
    """Return how far the unsharded model comes from itself if each of its parameters is rounded once more."""
    model, generator = _built(draw), torch.Generator().manual_seed(draw.number)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 1e-16 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    found = Outcome()
    _compare(found, wanted, of_whole(draw, model).records())
    return found.error


def _built(draw: Draw) -> Any:
    if draw.kind == "adapters":
        return importlib.import_module("adapted").with_adapters(draw)
    model = (importlib.import_module("cases") if draw.kind == "cases" else models).build(draw)
    if draw.checkpointing:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # newer releases of transformers have another name for it
            model.gradient_checkpointing_enable({"use_reentrant": draw.checkpointing == "reentrant"})
    return model


def _class(path: str) -> Any:
    home, _, name = path.partition(".")
    return getattr(importlib.import_module(home), name)


def _unsharded(call: Callable[[], Any]) -> Any:
    """Return what a call of the unsharded model gives, or in words why there is nothing."""
    try:
        return call()
    except Exception as error:  # whatever the library cannot do is not asked of the sharded model
        return f"{type(error).__name__}: {error}"


def _same_but_for_rounding(outcome: Outcome, outside: dict[str, Tensor], inside: dict[str, Tensor]) -> None:
    """Make sure that a model without float32 islands is the one with them: the context is shardcore's own."""
    for name, wanted in outside.items():
        if wanted.isnan().any():  # what attends to nothing is computed of the least number there is
            continue
        if not torch.allclose(wanted.double(), inside[name].double(), rtol=1e-4, atol=1e-4):
            outcome.problems.append(f"{name} of the unsharded model is another one without float32 islands")


def _refused(outcome: Outcome, draw: Draw, run: Any) -> list[Record] | None:
    """Return the records of the sharded model; None if it was refused, and then the outcome says whether rightly."""
    before = {name: id(p) for name, p in run.model.named_parameters()}
    calls = False
    try:
        run.shard()
        dist.barrier()
        calls = True
        got: list[Record] = run.records()
    except ShardcoreError as error:
        same = calls or before == {name: id(p) for name, p in run.model.named_parameters()}
        expected = draw.refused() or any(why in str(error) for why in draw.may)
        if not expected or not same:
            outcome.problems.append(f"{type(error).__name__}: {error}" + ("" if same else " (and the model changed)"))
        outcome.state = "failed" if outcome.problems else "refused"
        return None
    if why := draw.refused():
        outcome.problems.append(f"was not refused, though it has to be: {why}")
    return got
