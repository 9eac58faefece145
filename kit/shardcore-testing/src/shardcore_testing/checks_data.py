"""Checks of data parallelism: replicas that see other batches train as one model on all of them."""

from __future__ import annotations

import copy
import dataclasses
import logging
import warnings
from typing import Any

import torch

from shardcore.mesh.context import context_of
from shardcore_testing.findings import Ledger
from shardcore_testing.parity import gradient_errors, parameter_errors, whole
from shardcore_testing.subject import Subject, adamw

_STEPS = 2


def data_parallel(s: Subject, ledger: Ledger) -> None:
    """Two replicas with batches of their own: gradients are the mean of both, clipped by one norm, for two steps."""
    with ledger.check("data parallel"):
        _trains(s, ledger)


def experts(s: Subject, ledger: Ledger) -> None:
    """Two replicas that share the experts, each with whole ones, train as one model on all batches."""
    with ledger.check("experts"):
        if s.case.supports.experts is not True:
            ledger.closed("expert parallelism")
            return
        _trains(dataclasses.replace(s, fields={**s.fields, "ep": s.dp}), ledger)


def _trains(s: Subject, ledger: Ledger) -> None:
    # Its advice about meshes of several axes, and about outputs that are changed in place, which nobody does here.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    reference = s.build()
    model = s.shard(copy.deepcopy(reference))
    optimizers = [adamw(m) for m in (reference, model)]
    replica = _replica(s, model)
    for step in range(_STEPS):
        with ledger.place(f"step {step}"):
            _losses(s, ledger, reference, model, [s.dp * step + r for r in range(s.dp)], replica)
            ledger.errors(gradient_errors(reference, model))
            limit = 0.5 * _norm(reference)
            clipped = [torch.nn.utils.clip_grad_norm_(m.parameters(), limit) for m in (reference, model)]
            wanted, got = map(whole, clipped)
            ledger.close("gradient norm", wanted, got)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            ledger.errors(parameter_errors(reference, model))


def _losses(s: Subject, ledger: Ledger, reference: Any, model: Any, seeds: list[int], replica: int) -> None:
    """Run the unsharded model backwards through the batches of all replicas, and each replica through its own."""
    for index, seed in enumerate(seeds):
        inputs = s.inputs(reference, seed)
        wanted = s.loss(reference(**inputs))
        (wanted / len(seeds)).backward()
        if index == replica:
            got = s.loss(model(**inputs))
            ledger.close("loss", wanted, got)
            got.backward()


def _norm(reference: Any) -> float:
    return float(torch.nn.utils.get_total_norm([p.grad for p in reference.parameters() if p.grad is not None]))


def _replica(s: Subject, model: Any) -> int:
    context = context_of(model)
    return s.rank if context is None else context.replica
