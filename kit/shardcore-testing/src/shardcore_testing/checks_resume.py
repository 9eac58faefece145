"""Checks of training checkpoints: a training that was saved goes on, on the same mesh and on others."""

from __future__ import annotations

import copy
import logging
import warnings
from typing import Any

import torch

import shardcore
from shardcore._torch import SCALES_PARTIAL
from shardcore_testing.checks_random import DROPOUT
from shardcore_testing.checks_state import other_weights, shared_folder, train_step
from shardcore_testing.findings import Ledger
from shardcore_testing.parity import parameter_errors, part_of
from shardcore_testing.subject import Subject, adamw


def resume(s: Subject, ledger: Ledger) -> None:
    """A training goes on from `save_checkpoint`: on the same mesh bit for bit, dropout on; on others as unsharded."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    with ledger.check("resume"), shared_folder(s) as folder:
        _same_mesh(s, ledger, f"{folder}/same")
        _other_meshes(s, ledger, f"{folder}/other")


def _same_mesh(s: Subject, ledger: Ledger, folder: str) -> None:
    """The parts of parameters and optimizer state are those of the training that went on, bit for bit."""
    reference = s.build(**(DROPOUT if s.case.supports.dropout else {}))
    model, again = s.shard(copy.deepcopy(reference)), s.shard(other_weights(reference))
    optimizer, own = adamw(model), adamw(again)
    train_step(s, model, optimizer, 0)
    shardcore.save_checkpoint(folder, model, optimizer)
    train_step(s, model, optimizer, 1)
    torch.rand(s.rank + 1)
    shardcore.load_checkpoint(folder, again, own)
    train_step(s, again, own, 1)
    for (name, wanted), got in zip(model.named_parameters(), again.parameters(), strict=True):
        equal = torch.equal(part_of(wanted), part_of(got))
        ledger.true(equal, f"{name} is another one a step after loading on the same mesh than without")
        for key, value in optimizer.state[wanted].items():
            equal = torch.equal(part_of(value), part_of(own.state[got][key]))
            ledger.true(equal, f"{key} of {name} is another one a step after loading on the same mesh")


def _other_meshes(s: Subject, ledger: Ledger, folder: str) -> None:
    reference, model = s.twins()
    untrained = other_weights(reference)
    wanted, optimizer = adamw(reference), adamw(model)
    train_step(s, reference, wanted, 0)
    train_step(s, model, optimizer, 0)
    shardcore.save_checkpoint(folder, model, optimizer)
    train_step(s, reference, wanted, 1)
    for name, fields in _meshes(s).items():
        into = copy.deepcopy(untrained)
        if fields is not None:
            s.shard(into, **fields)
        own = adamw(into)
        with ledger.place(f"one step after loading {name}"):
            shardcore.load_checkpoint(folder, into, own)
            train_step(s, into, own, 1, like=reference)
            ledger.errors(parameter_errors(reference, into))


def _meshes(s: Subject) -> dict[str, dict[str, Any] | None]:
    found: dict[str, dict[str, Any] | None] = {"unsharded": None}
    replicas = next(count for count in range(2, s.tp + 1) if s.tp % count == 0)
    found[f"on tp {s.tp // replicas} x dp {replicas}"] = {"tp": s.tp // replicas, "dp": replicas}
    if s.case.supports.sequence:
        # No step takes sums that were deferred where torch clips them wrongly.
        deferred = {"partial_gradients": "deferred"} if SCALES_PARTIAL else {}
        found["under sequence parallelism"] = {"enable_sequence_parallelism": True, **deferred}
    return found
