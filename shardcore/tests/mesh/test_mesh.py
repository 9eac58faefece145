"""Where the tensors of a process group live."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tiny import build, shard
from torch.distributed.device_mesh import DeviceMesh

from shardcore.agree import received
from shardcore.mesh import axes
from shardcore.mesh.axes import AXES, Sizes, _device_type, build_mesh, device_type_of, group_of, time_limit


@pytest.mark.parametrize(
    ("backends", "accelerator", "wanted"),
    [
        ("cpu:gloo,cuda:nccl", "cuda", "cuda"),  # init_process_group() without a backend
        ("cuda:nccl", "cuda", "cuda"),
        ("cpu:gloo,xpu:xccl", "xpu", "xpu"),
        ("cpu:gloo,npu:hccl", "npu", "npu"),
        ("cpu:gloo,cuda:nccl", None, "cpu"),  # a build of torch for CUDA, and no device
        ("cpu:gloo,cuda:gloo", "cuda", "cpu"),
        ("cpu:mpi,cuda:mpi", "cuda", "cpu"),
        ("cpu:gloo", "cuda", "cpu"),
        ("undefined", "cuda", "cpu"),
    ],
)
def test_a_group_is_where_its_backend_is(backends, accelerator, wanted):
    assert _device_type(backends, accelerator) == wanted


def test_the_device_is_that_of_a_group_started_without_a_backend(monkeypatch):
    monkeypatch.setattr(dist, "get_backend", lambda group: "undefined")
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(axes, "accelerator", lambda: "cuda")
    assert device_type_of() == "cuda"


def test_weights_travel_over_the_device_of_the_group(monkeypatch):
    """CPU parameters over a group of an accelerator, for which the meta device stands."""
    sent = []
    monkeypatch.setattr(received, "device_type_of", lambda group: "meta")
    monkeypatch.setattr(dist, "broadcast", lambda tensor, source, group: sent.append(tensor))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    model = build()
    received.receive(model, 0, None)
    assert len(sent) == len(list(model.parameters())) + 1  # the training modes
    assert {tensor.device.type for tensor in sent} == {"meta"}
    assert all(tensor.is_contiguous() for tensor in sent)
    assert {p.device.type for p in model.parameters()} == {"cpu"}


def limits():
    context = shard(build(layers=1), tensor_parallel_size=4).__dict__["_shard_context"]
    world = time_limit()
    context.join_neighbours(2)
    of_two_axes = build_mesh(Sizes(dp_shard=2, tp=2))  # torch takes the default group for an axis of all ranks
    groups = [*context.mesh.get_all_groups(), *of_two_axes.get_all_groups(), context.among(2).group]
    return world, [time_limit(group) for group in groups], time_limit(context.group)


def test_groups_wait_as_long_as_the_default_one(pool):
    """Not the half hour that torch gives to groups of meshes: a rank that is gone is an error, and not a hang."""
    world, groups, tp = pool.run(limits, world=4)[3]
    assert pool.collective_timeout <= world.total_seconds() < 600  # longer on a busy machine
    assert set(groups) == {world}
    assert tp == world


def groups_of_meshes():
    groups = []
    for sizes in (Sizes(dp_shard=2, tp=2), Sizes(pp=2, ep=2), Sizes(tp=4)):
        mesh = build_mesh(sizes)
        groups.append(set(mesh.get_all_groups()))
        for axis in AXES:
            total = torch.ones(())
            dist.all_reduce(total, group=mesh.get_group(axis))
            assert total == mesh[axis].size() == getattr(sizes, axis)
            assert dist.get_process_group_ranks(mesh.get_group(axis)) == mesh[axis].mesh.tolist()
    return [len(of_mesh) for of_mesh in groups], len(set.union(*groups)), dist.group.WORLD in groups[-1]


def test_axes_of_one_rank_share_one_group(pool):
    """Each group has threads of its own, of which gloo's wake a hundred times a second."""
    assert pool.run(groups_of_meshes, world=4) == [([3, 3, 2], 6, True)] * 4


def groups_of_a_part():
    names = {"mesh_dim_names": ("dp_shard", "tp")}
    one, other = DeviceMesh("cpu", [[0, 1]], **names), DeviceMesh("cpu", [[1], [0]], **names)  # every rank makes them
    if dist.get_rank() == 2:
        return None
    before = len(dist.distributed_c10d._world.pg_map)
    (group,) = {group_of(mesh) for mesh in (one, one, other)}
    total = torch.ones(())
    dist.all_reduce(total, group=group)
    made = len(dist.distributed_c10d._world.pg_map) - before
    return made, dist.get_process_group_ranks(group), total.item(), time_limit(group) == time_limit()


def test_meshes_of_some_ranks_share_one_group(pool):
    """Each new one has its threads and connections, and a name on which its ranks may differ."""
    assert pool.run(groups_of_a_part, world=3) == [(1, [0, 1], 2.0, True)] * 2 + [None]
    assert pool.run(groups_of_a_part, world=3) == [(0, [0, 1], 2.0, True)] * 2 + [None]
