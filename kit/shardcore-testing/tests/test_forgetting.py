"""A worker that has left a group keeps neither its threads nor a mesh, whatever held them."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from types import ModuleType
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shardcore._torch import CAN_TRACE
from shardcore.comm.collectives import Channel
from shardcore.mesh.axes import Sizes, build_mesh

pytestmark = pytest.mark.nightly

HELD = []  # on the ranks
TRACED: list[ref[DeviceMesh]] = []


def make_a_mesh(size):
    mesh = build_mesh(Sizes(tp=dist.get_world_size()))["tp"]
    # DTensor remembers how it came from one layout to the other, with the mesh.
    distribute_tensor(torch.ones(size), mesh, [Shard(0)]).redistribute(placements=[Replicate()])
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_groups_of_earlier_tasks_have_no_threads_left(pool):
    counts = [pool.run(make_a_mesh, size, world=world)[0] for size, world in enumerate((2, 1) * 5, 4)]
    assert max(counts[-4:]) <= max(counts[:4]), counts


def hold_a_mesh(number):
    HELD.clear()  # the cycle of the task before, which is garbage from now on
    cycle = [build_mesh(Sizes(tp=dist.get_world_size()))]
    HELD.append([*cycle, cycle])
    cycle.append(HELD[0])
    many = {f"imported_by_a_task_{number}_{i}": ModuleType("imported") for i in range(300)}
    sys.modules.update(many)  # what the pool keeps out of collections from now on, and the cycle with it
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_groups_have_no_threads_left_where_garbage_that_holds_them_was_frozen(pool):
    counts = [pool.run(hold_a_mesh, number, world=world)[0] for number, world in enumerate((2, 2, 1, 1) * 5)]
    pool.run(forget_what_was_held)
    assert max(counts[-4:]) <= max(counts[:4]), counts


def compile_a_sum(number):
    channel = Channel(build_mesh(Sizes(tp=dist.get_world_size()))["tp"].get_group())

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(x):
        return channel.all_reduce(number * x)

    step(torch.ones(2))
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_groups_have_no_threads_left_where_they_were_compiled_in(pool):
    counts = [pool.run(compile_a_sum, number, world=world)[0] for number, world in enumerate((2, 2, 1, 1) * 4)]
    assert max(counts[-4:]) <= max(counts[:4]), counts


def compile_with_a_dtensor(rows):
    mesh = build_mesh(Sizes(tp=dist.get_world_size()))
    TRACED.append(ref(mesh))
    x = distribute_tensor(torch.ones(rows, 4), mesh["tp"], [Shard(0)])
    # With dynamic shapes torch's C++ part keeps symbols, with all that was traced, and no reference can be found.
    torch.compile(lambda y: (y * y.shape[0]).sum(), backend="aot_eager", dynamic=False)(x)


def traced_meshes():
    gc.unfreeze()
    gc.collect()
    return sum(mesh() is not None for mesh in TRACED)


@pytest.mark.skipif(not CAN_TRACE, reason="torch before 2.13 keeps what it traced, and no reference can be found")
def test_meshes_that_were_traced_are_forgotten(pool):
    for rows in (4, 6):
        pool.run(compile_with_a_dtensor, rows)
    assert pool.run(traced_meshes, world=1) == [0]


def forget_what_was_held():
    HELD.clear()
    for name in [name for name in sys.modules if name.startswith("imported_by_a_task_")]:
        del sys.modules[name]
