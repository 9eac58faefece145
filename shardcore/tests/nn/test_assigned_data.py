"""What is assigned to ``.data`` of a sharded parameter is refused where torch would drop it."""

from __future__ import annotations

import pytest
import torch
from tiny import TinyPolicy, batch, build
from torch import nn

import shardcore
from shardcore import NotSupportedError
from shardcore.nn import ColumnLinear


def assigns_to_a_module_alone():
    linear = ColumnLinear.from_native_module(nn.Linear(4, 6))
    before = linear.weight.full_tensor()
    for value in (torch.zeros(6, 4), torch.zeros_like(linear.weight)):
        with pytest.raises(NotSupportedError, match=r"\.data of a sharded tensor \(6, 4\)"):
            linear.weight.data = value
    assert torch.equal(linear.weight.full_tensor(), before)


def test_a_module_that_was_replaced_by_itself(pool):  # the first of this file: others let torch refuse it too
    pool.run(assigns_to_a_module_alone)


def assigns(fields):
    model = shardcore.shard(build(), policy=TinyPolicy(), **fields)
    parameter = next(p for p in model.parameters() if p.dim() == 2)
    before = parameter.full_tensor().clone()
    for value in (
        torch.zeros(before.shape),
        torch.zeros_like(parameter.data),
        parameter.data.float(),
        parameter.T.T + 0,
    ):
        with pytest.raises(NotSupportedError, match="Nothing was changed"):
            parameter.data = value
    assert torch.equal(parameter.full_tensor(), before)
    parameter.data = parameter.data
    parameter.data *= 2
    parameter.data.add_(1)
    assert torch.equal(parameter.full_tensor(), before * 2 + 1)
    del parameter
    model(batch()).sum().backward()
    model.float()
    assert {p.to_local().dtype for p in model.parameters()} == {torch.float32}
    weight = model.head.weight
    doubled = torch.compile(lambda p: p.data * 2, fullgraph=True, backend="eager")(weight)
    assert torch.equal(doubled.full_tensor(), weight.full_tensor() * 2)


@pytest.mark.parametrize("fields", [{"tp": 2}, {"dp": 2}, {"tp": 1, "dp_replicate_size": 2}])
def test_what_would_be_dropped_is_refused_and_what_is_there_already_is_not(pool, fields):
    pool.run(assigns, fields)
