"""Ranks that torchrun has started again find each other, and nobody who is dead."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import threading

import pytest
from torch.distributed import HashStore

from shardcore.apply.restarts import agreed_store
from shardcore.errors import MissingRanksError

# The second time, the first rank is late, so that the other one sees what it had left in the store.
SCRIPT = """
import os, time, torch, torch.distributed as dist, shardcore
again = os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"
if again and os.environ["RANK"] == "0":
    time.sleep(2)
shardcore.launch_from_torch()
for _ in range(2):
    group = dist.new_group()
    one = torch.ones(())
    dist.all_reduce(one, group=group)
    assert one == 2
if not again:
    os._exit(1)
print("found", flush=True)
dist.barrier()
os._exit(0)
"""


@pytest.mark.nightly
def test_ranks_that_torchrun_starts_again(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("TORCH") and k not in ("RANK", "WORLD_SIZE")}
    process = subprocess.Popen([*command, str(script)], env=clean, stdout=subprocess.PIPE, text=True)
    try:
        printed, _ = process.communicate(timeout=100)
    finally:
        process.terminate()  # unlike a kill, it lets torchrun stop its ranks
        process.wait()
    assert process.returncode == 0
    assert printed.split() in (["found"] * 2, ["foundfound"])  # ranks write into one pipe


def start(store, ranks, found, world=3, seconds=10.0):
    def meet(rank):
        try:
            store_of_rank = agreed_store(store, rank, world, datetime.timedelta(seconds=seconds))
            store_of_rank.set(f"{rank}", "")
            found[rank] = store_of_rank
        except MissingRanksError as error:
            found[rank] = error

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    return threads


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_nobody_sees_what_others_have_left(order):
    shared = HashStore()
    for _ in range(3):  # starts that follow each other on one store
        found, threads = {}, []
        for rank in order:
            threads += start(shared, [rank], found)
            threads[-1].join(0.1)  # late ones meet what is left of the start before
        for thread in threads:
            thread.join()
        assert sorted(found) == [0, 1, 2]
        assert all(store.check(["0", "1", "2"]) for store in found.values())
        assert not found[0].check(["left"])
        found[0].set("left", "")


def test_a_rank_that_does_not_come():
    found = {}
    for thread in start(HashStore(), [0, 2], found, seconds=0.3):
        thread.join()
    assert [str(found[rank]) for rank in (0, 2)] == [
        f"rank {rank} has waited 0.3 s for the other ranks to start; the output of torchrun on each host says what "
        "became of them"
        for rank in (0, 2)
    ]
