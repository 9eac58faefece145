from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shardcore.comm import norms
from shardcore_testing.parity import assert_close, whole


def gradients(count):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in range(count)]


def parameters(meshes):
    """Return a parameter on each mesh, and one that is plain."""
    made = []
    for mesh, grad in zip((*meshes, None), gradients(len(meshes) + 1), strict=True):
        parameter, own = torch.zeros_like(grad), grad
        if mesh is not None:
            placements = [Shard(dim) for dim in range(mesh.ndim)]
            parameter, own = (distribute_tensor(t, mesh, placements) for t in (parameter, grad))
        parameter = nn.Parameter(parameter)
        parameter.grad = own
        made.append(parameter)
    return made


def clips(norm_type, foreach):
    one, two = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    installed = torch.tensor(float(hasattr(nn.utils.clip_grad, norms._INSTALLED)))
    dist.all_reduce(installed, dist.ReduceOp.MAX)  # earlier tests may have installed it on some of the ranks
    if not installed:
        with pytest.raises(RuntimeError, match="same mesh"):
            nn.utils.clip_grad_norm_(parameters((one, two))[:2], 1.0)
    norms.install()
    norms.install()
    for meshes in ((one, two), (one,)):
        ours = parameters(meshes)[: 2 if len(meshes) > 1 else 1]
        theirs = [nn.Parameter(torch.zeros(4, 6, dtype=torch.float64)) for _ in ours]
        for parameter, grad in zip(theirs, gradients(len(ours)), strict=True):
            parameter.grad = grad
        wanted = nn.utils.clip_grad_norm_(theirs, 1.0, norm_type)
        got = nn.utils.clip_grad_norm_(iter(ours), 1.0, norm_type, foreach=foreach)
        assert_close(wanted, whole(got), "norm")
        for a, b in zip(theirs, ours, strict=True):
            assert_close(a.grad, whole(b.grad), "gradient")
        norm = nn.utils.get_total_norm([p.grad for p in ours], norm_type)
        assert_close(nn.utils.get_total_norm([p.grad for p in theirs], norm_type), whole(norm), "norm alone")
    ours = parameters((one, two))[:2]
    ours[1].grad = ours[1].grad * float("inf")
    with pytest.raises(RuntimeError, match="is non-finite"):
        nn.utils.clip_grad_norm_(ours, 1.0, norm_type, error_if_nonfinite=True)
    dist.barrier()


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_gradients_on_two_meshes_are_clipped_by_one_norm(pool, norm_type, foreach):
    pool.run(clips, norm_type, foreach, world=4)


def test_of_nothing_and_of_plain_tensors():
    norms.install()
    assert float(nn.utils.clip_grad_norm_([], 1.0)) == 0.0
    plain = nn.Parameter(torch.zeros(3))
    plain.grad = torch.tensor([0.0, 3.0, 4.0])
    assert float(nn.utils.clip_grad_norm_(plain, 1.0)) == 5.0
    assert_close(torch.tensor([0.0, 0.6, 0.8]), plain.grad, "gradient", 1e-5)
