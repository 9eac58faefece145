from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardcore.mesh.context import ShardContext
from shardcore_shardformer.foreign import distribute_local_parameters, local_problem


class Local(nn.Module):
    def __init__(self, **shapes):
        super().__init__()
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)))
        self.inner = nn.Module()

    def forward(self):
        return sum((p.sum() for p in self._parameters.values()), torch.zeros(()))


NATIVE = {"rows": (7, 4), "columns": (4, 7), "whole": (4,), "inner.deep": (7,)}


def distributed():
    context = ShardContext.of(init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    mine = 4 - dist.get_rank()  # of 7: torch.chunk gives 4 and 3
    module = Local(rows=(mine, 4), columns=(4, mine), whole=(4,))
    module.inner.deep = nn.Parameter(torch.ones(mine, dtype=torch.float64), requires_grad=False)
    values = {n: p.detach().clone() for n, p in module.named_parameters()}
    assert local_problem(module, NATIVE, context) is None
    distribute_local_parameters(module, NATIVE, context)
    assert {n: p.placements for n, p in module.named_parameters()} == {
        "rows": (Shard(0),),
        "columns": (Shard(1),),
        "whole": (Replicate(),),
        "inner.deep": (Shard(0),),
    }
    for name, parameter in module.named_parameters():
        assert tuple(parameter.shape) == NATIVE[name]
        assert torch.equal(parameter.to_local().detach(), values[name])
        assert parameter.requires_grad == (name != "inner.deep")
    module().backward()
    assert isinstance(module.rows.grad, DTensor)
    assert tuple(module.rows.grad.full_tensor().shape) == (7, 4)
    assert type(module).__name__ == "Local"

    for wrong, text in (
        (Local(rows=(3 + 2 * dist.get_rank(), 4)), "its parameter 'rows' of Local has shape"),
        (
            Local(other=(4,)),
            "it has a parameter 'other' that the native module lacks (rows, columns, whole, inner.deep)",
        ),
    ):
        assert local_problem(wrong, NATIVE, context).startswith(text)
    deep = Local(whole=(4,))
    deep.inner.strange = nn.Parameter(torch.ones(2))
    assert "'strange'" in local_problem(deep, NATIVE, context)
    assert local_problem(deep, NATIVE, context, recurse=False) is None


@pytest.mark.parametrize("world", [2])
def test_local_parameters_become_dtensors(pool, world):
    pool.run(distributed, world=world)
