"""Checks of a model that is not sharded itself, and of which a part is."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardcore
from shardcore.errors import NoPolicyError, PlanError, ShardcoreError
from shardcore_testing.checks_state import save_beside, shared_folder
from shardcore_testing.findings import Ledger
from shardcore_testing.parity import gradient_errors
from shardcore_testing.subject import Subject, adamw, torch_lacks

_STEPS = 2  # what has come apart shows after the first


def inside(s: Subject, ledger: Ledger) -> None:
    """The base model is sharded by itself, its head is not: files, gradients, their norm, and the step after a step.

    One that is tied to its head has to be refused: the tie would be gone after the first step (H15).
    """
    with ledger.check("inside"):
        reference = s.build()
        name = getattr(reference, "base_model_prefix", "")
        base = getattr(reference, name, None) if name else None
        if not isinstance(base, nn.Module) or s.case.policy is not None:
            ledger.closed("the model has no base model, of which the pack has a policy")
            return
        model = copy.deepcopy(reference)
        held = {id(parameter) for parameter in base.parameters()}
        named = reference.named_parameters(remove_duplicate=False)
        tied = any(id(parameter) in held for path, parameter in named if not path.startswith(f"{name}."))
        try:
            setattr(model, name, s.shard(getattr(model, name)))
        except NoPolicyError:
            ledger.closed(f"no policy serves {type(base).__name__}")
        except ShardcoreError as error:
            if isinstance(error, PlanError) and torch_lacks(error) is not None:
                raise  # closes the section
            ledger.true(tied, f"the base model is refused, though nothing outside is tied to it: {error}")
        else:
            if ledger.true(not tied, "a base model that something outside is tied to is sharded by itself (H15)"):
                _goes_on(s, ledger, reference, model)


def _goes_on(s: Subject, ledger: Ledger, reference: Any, model: Any) -> None:
    if s.case.supports.save_pretrained and hasattr(model, "save_pretrained"):
        with shared_folder(s) as folder:
            save_beside(s, ledger, reference, model, Path(folder))
    # No kernel for several tensors, which is the default on a card, takes plain ones and DTensors together.
    optimizers = [adamw(m, foreach=False) for m in (reference, model)]
    for step in range(_STEPS):
        with ledger.place(f"step {step}"):
            inputs = s.inputs(reference, step)
            wanted, got = (s.loss(m(**inputs)) for m in (reference, model))
            ledger.close("loss", wanted, got)
            for loss in (wanted, got):
                loss.backward()
            ledger.errors(gradient_errors(reference, model))
            norm = torch.nn.utils.get_total_norm([p.grad for p in reference.parameters() if p.grad is not None])
            ledger.close("norm of all gradients", norm, shardcore.grad_norm(model))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
