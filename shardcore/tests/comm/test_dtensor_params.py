from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from shardcore._torch import CAN_TRACE
from shardcore.comm.dtensor_params import expect_dtensor, local_tensor, read_local, read_partial, spec_of, with_spec
from shardcore.errors import NotSupportedError, WrapError
from shardcore.mesh.context import ShardContext
from shardcore_testing.observing import Collectives
from shardcore_testing.parity import assert_close


def _parameters(mode="in_backward"):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    full = torch.arange(10.0, dtype=torch.float64).view(5, 2)
    split = nn.Parameter(distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None))
    whole = nn.Parameter(distribute_tensor(full.clone(), mesh, [Replicate()], src_data_rank=None))
    return ShardContext.of(mesh, partial_gradients=mode), full, split, whole


def local_reads():
    _, full, split, whole = _parameters()
    plain = nn.Parameter(full.clone())
    a, b, c = read_local(split, whole, plain)
    assert not any(isinstance(t, DTensor) for t in (a, b, c))
    assert a.data_ptr() == local_tensor(split).data_ptr(), "reading copies nothing"
    (a.pow(2).sum() + b.pow(2).sum() * 3 + c.sum()).backward()
    for parameter in (split, whole):
        assert isinstance(parameter.grad, DTensor)
        assert parameter.grad.placements == parameter.placements
        assert parameter.grad.shape == parameter.shape
        assert parameter.grad.stride() == parameter.stride()
    assert_close(2 * full, split.grad, "split")
    assert_close(6 * full, whole.grad, "replicated")
    assert plain.grad.tolist() == [[1.0, 1.0]] * 5

    a, b = read_local(split, whole)
    a.sum().backward()  # the second output is not used
    assert_close(2 * full + 1, split.grad, "accumulated")
    assert_close(6 * full, whole.grad, "untouched")
    plain, other = (nn.Parameter(p.detach().clone()) for p in (split, whole))
    torch.cat(read_local(other, plain)).sum().backward()  # gradients that are views into one tensor
    copy.deepcopy((plain, other))
    assert plain.grad._local_tensor.is_contiguous()
    assert plain.grad._local_tensor.storage_offset() == 0
    part = local_tensor(split).detach()
    for view in (torch.stack([part, part])[1], part.t().contiguous().t()):
        made = with_spec(view, spec_of(split))
        assert (made._local_tensor.is_contiguous(), made._local_tensor.storage_offset()) == (True, 0)
        copy.deepcopy(made)
    with torch.no_grad():
        assert read_local(split)[0].data_ptr() == local_tensor(split).data_ptr()
    with pytest.raises(NotSupportedError, match="second derivatives are not supported"):
        torch.autograd.grad(read_local(split)[0].pow(2).sum(), split, create_graph=True)


def partial_reads(mode):
    context, full, _, whole = _parameters(mode)
    other = nn.Parameter(whole.detach().clone())
    factor = context.rank + 1.0
    total = sum(range(1, context.size + 1))
    for step in (1, 2):
        a, b = read_partial(context.channel, whole, other, deferred=context.defers)
        with Collectives() as counted:
            (a.pow(2).sum() * factor + b.sum() * factor).backward()
        assert counted.count == (1 if mode == "in_backward" else 0), "one bucket for all of a module's parameters"
        assert_close(2 * full * total * step, whole.grad, f"{mode}, backward {step}")
        assert_close(torch.full_like(full, total * step), other.grad, f"{mode}, backward {step}")
        wanted = Replicate() if mode == "in_backward" else Partial()
        assert whole.grad.placements == (wanted,)
    plain = full.detach().clone().requires_grad_()  # as torch.func.functional_call puts it in a parameter's place
    if context.defers:
        with pytest.raises(WrapError, match="functional_call with whole tensors"):
            read_partial(context.channel, whole, plain, deferred=True)
    else:
        (sum(read.sum() for read in read_partial(context.channel, whole, plain)) * factor).backward()
        assert_close(torch.full_like(full, total), plain.grad, "a plain tensor")
    with pytest.raises(NotSupportedError, match="second derivatives"):
        torch.autograd.grad(read_partial(context.channel, whole)[0].pow(2).sum(), whole, create_graph=True)


def compiled_reads():
    context, _, split, whole = _parameters()

    def loss(x):
        a, b = (*read_local(split), *read_partial(context.channel, whole))
        return (a.sum() + b.pow(2).sum()) * x

    x = torch.tensor(context.rank + 1.0, dtype=torch.float64)
    loss(x).backward()
    eager = [p.grad.full_tensor() for p in (split, whole)]
    split.grad = whole.grad = None
    torch.compile(loss, backend="aot_eager", fullgraph=CAN_TRACE)(x).backward()
    for wanted, parameter in zip(eager, (split, whole), strict=True):
        assert parameter.grad.placements == parameter.placements
        assert_close(wanted, parameter.grad, "compiled read")


def test_gradients_are_dtensors_of_the_parameters_spec(pool):
    pool.run(local_reads, world=2)


@pytest.mark.parametrize("mode", ["in_backward", "deferred"])
def test_partial_gradients_are_summed_once_for_each_backward(pool, mode):
    pool.run(partial_reads, mode, world=3)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo looks
@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")  # dynamo does
def test_compiled_equals_eager(pool):
    pool.run(compiled_reads, world=2)


class Packed(torch.Tensor):
    pass


@pytest.mark.parametrize(("tensor", "kind"), [(torch.empty(2), "plain tensor"), (Packed(2), "Packed")])
def test_what_stands_in_the_place_of_a_parameter_is_named(tensor, kind):
    with pytest.raises(WrapError, match=rf"holds a {kind} \(2,\) .*to quantize, say"):
        expect_dtensor(tensor)
