from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shardcore_testing.pool
from shardcore_testing import WorkerError, WorkerPool, WorkerTimeout

QUICK = 15.0  # seconds: a failure is reported long before the 30 s of a collective


@dataclass
class Pair:
    left: int
    right: int


class OwnError(Exception):
    pass


def sum_of_ranks(offset=0):
    total = torch.tensor(dist.get_rank() + offset)
    dist.all_reduce(total)
    return dist.get_world_size(), total.item()


def swap(pair):
    return Pair(pair.right, pair.left)


def fail_on(rank):
    if dist.get_rank() == rank:
        raise OwnError(f"broken on rank {rank}")
    dist.barrier()


def fail_everywhere():
    time.sleep(0.3 * (1 - dist.get_rank()))
    raise OwnError("broken")


def hang_on(rank):
    if dist.get_rank() == rank:
        threading.Event().wait()


def exit_on(rank):
    if dist.get_rank() == rank:
        os._exit(7)
    dist.barrier()


def unpicklable_on(rank):
    return threading.Lock() if dist.get_rank() == rank else None


def leave_traces():
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_num_threads(2)
    os.environ["SHARDCORE_TEST_TRACE"] = "1"


def traces():
    return (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        str(torch.get_default_device()),
        torch.get_num_threads(),
        "SHARDCORE_TEST_TRACE" in os.environ,
    )


def draw():
    return torch.rand(2)


def process_id():
    return os.getpid()


def hash_seed():
    return os.environ["PYTHONHASHSEED"], hash("a string")


def make_subgroup():
    group = dist.new_group([0, 1])
    return group.group_name


def leave_the_group():
    dist.destroy_process_group()


def warn():
    warnings.warn("from a rank", UserWarning, stacklevel=1)


def join_from_environment():
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    return int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]), sum_of_ranks()


class Methods:
    @staticmethod
    def static():
        return dist.get_rank()

    def bound(self):
        return dist.get_rank()


def test_results_come_in_the_order_of_the_ranks(pool):
    assert pool.run(dist.get_rank, world=4) == [0, 1, 2, 3]
    assert pool.run(Methods.static) == [0, 1]


@pytest.mark.nightly
def test_the_group_has_exactly_the_ranks_that_were_asked_for(pool):
    for world in (2, 4, 2, 3, 4, 1):
        total = sum(rank + 1 for rank in range(world))
        assert pool.run(sum_of_ranks, offset=1, world=world) == [(world, total)] * world


def test_workers_are_kept(pool):
    assert pool.run(process_id, world=4)[:2] == pool.run(process_id)


def test_classes_of_a_test_module_travel_both_ways(pool):
    assert pool.run(swap, Pair(1, 2)) == [Pair(2, 1)] * 2


def test_tensors_are_results(pool):
    first, second = pool.run(draw)
    assert torch.equal(first, second)
    assert torch.equal(first, torch.rand(2, generator=torch.Generator().manual_seed(0)))


def test_a_task_leaves_no_traces(pool):
    before = pool.run(traces)
    pool.run(leave_traces)
    assert pool.run(traces) == before == [(True, torch.float32, "cpu", 1, False)] * 2


def test_groups_that_a_task_made_are_destroyed(pool):
    first = pool.run(make_subgroup)
    assert len(set(first)) == 1
    assert pool.run(sum_of_ranks) == [(2, 1)] * 2


def test_a_task_may_destroy_the_default_group(pool):
    pool.run(leave_the_group)
    assert pool.run(sum_of_ranks) == [(2, 1)] * 2


def test_a_function_may_make_the_default_group_itself(pool):
    for _ in range(2):
        results = pool.run(join_from_environment, world=3, process_group=False)
        assert results == [(rank, 3, (3, 3)) for rank in range(3)]
    assert pool.run(sum_of_ranks, world=3) == [(3, 3)] * 3


@pytest.mark.nightly
def test_a_failure_is_reported_before_the_other_ranks_time_out(pool):
    pool.run(sum_of_ranks)  # starting ranks takes long on a busy machine
    start = time.monotonic()
    with pytest.raises(WorkerError, match="broken on rank 1") as caught:
        pool.run(fail_on, 1)
    assert time.monotonic() - start < QUICK
    assert [(failure.rank, failure.error) for failure in caught.value.failures] == [(1, "OwnError")]
    assert "in fail_on" in caught.value.failures[0].details
    assert "in barrier" in caught.value.stacks[0]
    assert pool.run(sum_of_ranks) == [(2, 1)] * 2


def test_the_first_failure_comes_first_and_the_workers_are_kept(pool):
    before = pool.run(process_id)
    with pytest.raises(WorkerError) as caught:
        pool.run(fail_everywhere)
    assert [failure.rank for failure in caught.value.failures] == [1, 0]
    assert str(caught.value).index("rank 1: OwnError") < str(caught.value).index("rank 0: OwnError")
    assert pool.run(process_id) == before
    assert pool.run(sum_of_ranks) == [(2, 1)] * 2


@pytest.mark.nightly
def test_a_hang_is_reported_with_its_stack(pool):
    with pytest.raises(WorkerTimeout, match=r"within [\d.]+ s: ranks 1") as caught:
        pool.run(hang_on, 1, timeout=2.0)
    assert set(caught.value.stacks) == {1}
    *_, last = str(caught.value).splitlines()
    assert last.startswith("rank 1 was in ")
    assert "in hang_on" in last
    assert pool.run(sum_of_ranks) == [(2, 1)] * 2


@pytest.mark.nightly
def test_a_death_is_reported_with_its_exit_code(pool):
    start = time.monotonic()
    with pytest.raises(WorkerError, match="rank 0 ended with exit code 7"):
        pool.run(exit_on, 0)
    assert time.monotonic() - start < QUICK
    assert pool.run(sum_of_ranks) == [(2, 1)] * 2


def test_a_result_that_cannot_be_pickled_names_its_rank(pool):
    with pytest.raises(WorkerError, match="rank 1 returned a lock that cannot be pickled"):
        pool.run(unpicklable_on, 1)
    assert pool.run(sum_of_ranks) == [(2, 1)] * 2


def test_warnings_are_filtered_as_in_the_parent(pool):
    with pytest.raises(WorkerError, match="UserWarning: from a rank"):
        pool.run(warn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert pool.run(warn) == [None, None]


def test_functions_without_a_name_of_their_own_are_refused(pool):
    def nested():
        return 0

    for function in (nested, lambda: 0, functools.partial(sum_of_ranks, 1), Methods().bound):
        with pytest.raises(TypeError, match="top level of a module"):
            pool.run(function)


def test_more_ranks_than_the_pool_has_are_refused(pool):
    with pytest.raises(ValueError, match="world=5 is out of range: this pool runs 1 to 4 ranks"):
        pool.run(sum_of_ranks, world=5)


@pytest.mark.nightly
def test_a_collective_ends_at_the_limit_of_the_pool():
    with WorkerPool(2, collective_timeout=1.0) as pool, pytest.raises(WorkerError) as caught:
        pool.run(leave_a_rank_waiting)
    assert [failure.rank for failure in caught.value.failures] == [0]


def leave_a_rank_waiting():
    if dist.get_rank() == 0:
        dist.barrier()


def stop_rank_1(pool):
    """Stop the process of rank 1, in a pool that has to make another group for its next call on 2 ranks."""
    before = pool.run(process_id)
    pool.run(process_id, world=1)
    os.kill(before[1], signal.SIGSTOP)
    return before


@pytest.mark.nightly
def test_ranks_that_do_not_find_each_other_are_replaced(monkeypatch):
    monkeypatch.setattr(shardcore_testing.pool, "_JOIN_LIMIT", 5.0)
    with WorkerPool(2) as pool:
        before = stop_rank_1(pool)
        assert not set(pool.run(process_id)) & set(before)


@pytest.mark.nightly
def test_ranks_that_never_find_each_other_are_reported(monkeypatch):
    monkeypatch.setattr(shardcore_testing.pool, "_JOIN_LIMIT", 1.0)
    monkeypatch.setattr(shardcore_testing.pool, "_JOIN_TRIES", 1)
    with WorkerPool(2) as pool:
        stop_rank_1(pool)
        with pytest.raises(WorkerTimeout, match="making a process group of 2 ranks did not finish within"):
            pool.run(process_id)


ORPHANS = """
import os, sys, time
sys.path.insert(0, {folder!r})
import {module}
from shardcore_testing import WorkerPool
if __name__ == "__main__":
    pool = WorkerPool(1)
    print(pool.run({module}.process_id, world=1)[0], flush=True)
    if {busy}:
        import threading
        threading.Timer(1, os._exit, (0,)).start()
        pool.run({module}.hang_on, 0, world=1)
    os._exit(0)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("busy", [False, True])
def test_workers_end_with_their_parent(tmp_path, busy):
    here = Path(__file__)
    script = tmp_path / "orphans.py"
    script.write_text(ORPHANS.format(folder=str(here.parent), module=here.stem, busy=busy))
    env = {**os.environ, "TMPDIR": str(tmp_path)}  # a parent that is killed leaves the files of its pool behind
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=True, env=env
    )
    process = int(done.stdout)
    end = time.monotonic() + QUICK
    while is_running(process) and time.monotonic() < end:
        time.sleep(0.1)
    assert not is_running(process)


def is_running(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{process}/stat")
    # An orphan that nobody reaps, as in a container without an init process, is a zombie.
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_every_rank_has_a_hash_seed_of_its_own_in_every_run(pool):
    before = os.environ.get("PYTHONHASHSEED")
    seeds, hashes = zip(*pool.run(hash_seed, world=3), strict=True)
    assert seeds == ("1", "2", "3")
    assert len(set(hashes)) == 3
    assert os.environ.get("PYTHONHASHSEED") == before
