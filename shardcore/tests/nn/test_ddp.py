"""DDP refuses what holds a sharded model, as it refuses the model."""

from __future__ import annotations

import pytest
import torch
from tiny import batch, build, shard
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardcore import WrapError

ITSELF = r"DistributedDataParallel cannot wrap a sharded model.*shardcore\.shard\(model, tp=\.\.\., dp=\.\.\.\)"
HOLDS = r"a (Holder|ModuleDict) that holds a sharded Tiny.*leave DDP out"


class Holder(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.body = model
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, ids):
        return self.body(ids) * self.scale


def refused():
    model = shard(build(), tp=2)
    with pytest.raises(WrapError, match=ITSELF):
        DistributedDataParallel(model)
    for module in (Holder(model), nn.ModuleDict({"a": nn.Linear(2, 2), "b": Holder(model)})):
        with pytest.raises(WrapError, match=HOLDS):
            DistributedDataParallel(module)
    assert DistributedDataParallel(nn.Linear(2, 2))(torch.ones(1, 2)).shape == (1, 2)
    # Nothing of the model is DDP's then.
    holder = Holder(model)
    names = [name for name, _ in (*holder.named_parameters(), *holder.named_buffers()) if name.startswith("body.")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(holder, names)
    out = DistributedDataParallel(holder)(batch())
    out.sum().backward()
    assert holder.scale.grad is not None


def test_a_holder_of_a_sharded_model(pool):
    pool.run(refused, world=2)
