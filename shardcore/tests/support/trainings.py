"""A small training of `tiny`'s model: parameter groups, frozen parameters, a schedule; on any mesh."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tiny import TinyPolicy, batch, build
from torch.distributed.tensor import DTensor

import shardcore
from shardcore.errors import AgreementError, CheckpointError, ConfigError
from shardcore.mesh.context import context_of

ROWS = 4


class Training:
    """A model on a mesh, its optimizer and its schedule.

    Args:
        fields: of the configuration; None for an unsharded model.
        seed: of the weights.
        given: give the optimizer to ``shard`` instead of making it after.
        options: of the model.
    """

    def __init__(self, fields=None, seed=0, given=False, steps=0, **options):
        self.model = build(seed, **{"tied": True, "kv_heads": 2, **options})
        self.model.model.positions.requires_grad_(False)
        optimizer = self._optimizer() if given else None
        if fields is not None:
            shardcore.shard(self.model, policy=TinyPolicy, optimizer=optimizer, **fields)
        self.optimizer = optimizer or self._optimizer()
        self.model.model.norm.requires_grad_(False)  # in the optimizer, without state
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, [lambda s: 0.9**s, lambda s: 1 / (s + 1)])
        self.run(range(steps))

    def _optimizer(self):
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        groups = [
            {"params": [p for name, p in named if name.endswith("weight")], "weight_decay": 0.1},
            {"params": [p for name, p in named if not name.endswith("weight")], "lr": 3e-3},
        ]
        return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.0, eps=1e-4)

    def run(self, steps):
        for step in steps:
            ids = self._own(batch(step, rows=ROWS))
            self.model(ids, labels=ids.roll(1, 1)).backward()
            if context_of(self.model) is not None:
                shardcore.reduce_partial_gradients(self.model)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
        return self

    def _own(self, ids):
        context = context_of(self.model)
        if context is None or context.sizes.replicas == 1:
            return ids
        return ids.chunk(context.sizes.replicas)[context.replica]

    def save(self, folder, **options):
        return shardcore.save_checkpoint(folder, self.model, self.optimizer, scheduler=self.schedule, **options)

    def load(self, folder, **options):
        return shardcore.load_checkpoint(folder, self.model, self.optimizer, scheduler=self.schedule, **options)

    def values(self):
        """Return all parameters and all optimizer state, whole."""
        found = {name: whole(p) for name, p in self.model.state_dict().items()}
        names = {id(p): name for name, p in self.model.named_parameters()}
        for parameter, state in self.optimizer.state.items():
            found |= {f"{names[id(parameter)]}.{key}": whole(value) for key, value in state.items()}
        found["lr"] = torch.tensor([group["lr"] for group in self.optimizer.param_groups])
        found["decay"] = torch.tensor([group["weight_decay"] for group in self.optimizer.param_groups])
        return found


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def largest(ours, theirs):
    """Return the largest difference of two trainings' values."""
    assert ours.keys() == theirs.keys()
    return torch.stack([(ours[name] - theirs[name]).abs().max().double() for name in ours]).max().item()


def draws():
    """Return the next numbers of the process's generators."""
    return random.random(), np.random.rand(), torch.rand(()).item()


def said(work):
    """Return what each rank says when ``work`` fails on all of them."""
    with pytest.raises((AgreementError, CheckpointError, ConfigError)) as caught:
        work()
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, f"{type(caught.value).__name__}: {caught.value}")
    return found
