"""What shardcore changes in torch is for the tensors of living sharded models, and ends with the last of them."""

from __future__ import annotations

import copy
import gc
import operator
import warnings

import pytest
import torch
from tiny import TinyPolicy, batch, build, twins
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim.optimizer import _global_optimizer_pre_hooks

import shardcore
from shardcore.errors import NotSupportedError, ShardcoreWarning
from shardcore.nn import ColumnLinear


def foreign(axis):
    """Return what DTensors that have nothing to do with shardcore give; ``"tp"`` is a mesh that equals a model's."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))

    def split(*placements):
        return distribute_tensor(torch.arange(8.0), mesh, placements or [Shard(0)])

    def stepped(kind, **options):
        parameter = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
        parameter.grad = parameter.detach() * 0.5
        kind([parameter], **options).step(*([lambda: torch.tensor(1.0)] if kind is torch.optim.LBFGS else []))
        return parameter.detach()

    def assigned(value):
        tensor = split()
        tensor.data = value
        return tensor

    def inf_on_one_rank():
        grads = [split(Replicate()), split()]
        if mesh.get_local_rank() == 1:
            grads[1].to_local().fill_(torch.inf)
        found = torch.zeros(())
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, torch.ones(()))
        return found

    lines = {
        "uniform": lambda: split(Replicate()).uniform_(),
        "bernoulli": lambda: split().bernoulli_(0.5),
        "dropout": lambda: nn.functional.dropout(split(Replicate()), 0.5),
        "data": lambda: assigned(torch.ones(8)),
        "data of a DTensor": lambda: assigned(split() * 2),
        "set": lambda: operator.setitem(tensor := split(), slice(1, 3), 9.0) or tensor,
        "a slice": lambda: split()[1:3].mul_(2),
        "LBFGS": lambda: stepped(torch.optim.LBFGS),
        "Adafactor": lambda: stepped(torch.optim.Adafactor),
        "fused SGD": lambda: stepped(torch.optim.SGD, lr=0.1, fused=True),
        "inf": inf_on_one_rank,
    }
    given = {}
    for name, line in lines.items():
        torch.manual_seed(3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of random numbers on CPUs, which torch says
            if axis != "tp":  # what was computed from a model's parameters is known by its mesh
                warnings.simplefilter("error", ShardcoreWarning)
            try:
                out = line()
            except (RuntimeError, NotImplementedError, ValueError) as error:
                given[name] = f"{type(error)} {error}"
            else:
                given[name] = str(out.to_local() if isinstance(out, DTensor) else out)
    return given


def of_torch():
    """Return what is changed."""
    return [
        dict(DTensor._op_dispatcher._custom_op_handlers),
        vars(DTensor).get("data"),
        vars(DTensor).get("__setitem__"),
        torch.manual_seed,
        len(_global_optimizer_pre_hooks),
    ]


def others_are_not_touched():
    gc.collect()
    torchs, before = of_torch(), (foreign("tp"), foreign("mine"))
    reference, model = twins(fields={"tp": 2})
    linear = ColumnLinear.from_native_module(nn.Linear(4, 6))
    assert (foreign("tp"), foreign("mine")) == before
    assert of_torch() != torchs
    copied = copy.deepcopy(model)
    del model, reference
    gc.collect()
    for weight in (copied.head.weight, linear.weight):
        with torch.no_grad(), pytest.raises(NotSupportedError, match="would draw by its own"):
            weight.uniform_()
    del copied, weight
    gc.collect()
    with pytest.raises(NotSupportedError, match=r"\.data of a sharded tensor"):
        linear.weight.data = torch.zeros(6, 4)
    del linear
    gc.collect()
    assert of_torch() == torchs
    model = shardcore.shard(build(), policy=TinyPolicy, tp=2)  # all of it comes back
    model(batch(), labels=batch()).backward()
    for tensor in (
        model.head.weight,
        model.head.weight.data,
        model.head.weight.grad,
        model.state_dict()["head.weight"],
    ):
        with torch.no_grad(), pytest.raises(NotSupportedError, match="would draw by its own"):
            tensor.normal_()
        with torch.no_grad(), pytest.raises(NotSupportedError, match="into a slice of a sharded tensor"):
            tensor[5:9].zero_()


def test_tensors_of_others_are_as_without_shardcore(pool):
    pool.run(others_are_not_touched, world=2)
