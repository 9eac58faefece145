"""A rank that calls a sharded model alone gets an error in seconds; one that is late is waited for."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hurry import hurry
from tiny import batch, twins

import shardcore
from shardcore import MissingRanksError
from shardcore.agree import presence
from shardcore.agree.meeting import Meeting
from shardcore_testing.parity import assert_close


def hurried(calls: int):
    """Return a model that has been called so often, on a rank that hurries."""
    hurry()
    reference, model = twins(fields={"tp": 2})
    for _ in range(calls):
        model(batch()).sum().backward()
    dist.barrier()
    return reference, model


def evaluates_while_others_go_on(calls: int):
    _, model = hurried(calls)
    rank, begin, said = dist.get_rank(), time.monotonic(), ""
    if rank == 0:
        with torch.no_grad(), pytest.raises(MissingRanksError) as caught:
            model(batch())
        assert caught.value.missing == (1,)
        said = str(caught.value)
    dist.barrier()
    took = time.monotonic() - begin
    if rank == 1:
        while not model._inputs_presence[0].failed:  # its thread hears of it
            time.sleep(0.05)
        with pytest.raises(MissingRanksError):
            model(batch())
    return said, took


@pytest.mark.nightly
@pytest.mark.parametrize("calls", [0, 5])
def test_a_rank_that_evaluates_alone_is_told_where_the_other_one_waits(pool, calls):
    (said, took), _ = pool.run(evaluates_while_others_go_on, calls)
    assert took < 20
    assert "rank 0 is in a call of a TinyLM that ranks 0, 1 share (at " in said
    assert "others will not come: rank 1 waits for this one in torch.distributed.barrier (at " in said
    assert said.count("test_presence.py:") == 2


def evaluates_while_others_train():
    _, model = hurried(5)
    # Nothing but their kind tells the two calls apart; what the other one sends would be taken for an answer.
    with torch.set_grad_enabled(dist.get_rank() == 1):
        model(batch())


def test_another_kind_of_call_on_one_rank_is_an_error_on_both(pool):
    with pytest.raises(Exception, match="others will not come") as caught:
        pool.run(evaluates_while_others_train, timeout=30)
    assert [failure.error for failure in caught.value.failures] == ["MissingRanksError"] * 2


def calls_while_others_save(calls: int, backward: bool):
    _, model = hurried(calls)
    output = model(batch()).sum() if backward else None
    if dist.get_rank() == 0:
        output.backward() if backward else model(batch())
    else:
        Meeting.hold([0, 1], {}, "save_pretrained", patience=3.0)


@pytest.mark.nightly
@pytest.mark.parametrize(("calls", "backward"), [(5, False), (5, True)])
def test_a_rank_that_waits_in_a_collective_is_told_too(pool, calls, backward):
    with pytest.raises(Exception, match=r"rank 1 waits for this one in save_pretrained") as caught:
        pool.run(calls_while_others_save, calls, backward, timeout=30)
    assert [failure.error for failure in caught.value.failures] == ["MissingRanksError"] * 2


def saves_while_others_call(folder: str):
    _, model = hurried(1)
    if dist.get_rank() == 0:
        shardcore.save_checkpoint(folder, model)
    else:
        model(batch())  # the second call, which is compared


def test_ranks_that_wait_in_different_meetings_are_told(pool, tmp_path):
    """Each has come to as many meetings as the other."""
    words = r"rank (0 is in save_checkpoint with|1 is in a call of) a TinyLM .* others will not come"
    with pytest.raises(Exception, match=words) as caught:
        pool.run(saves_while_others_call, str(tmp_path / "run"), timeout=30)
    assert [failure.error for failure in caught.value.failures] == ["MissingRanksError"] * 2


def late():
    reference, model = hurried(5)
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("shardcore").addHandler(handler)
    for _ in range(2):
        if dist.get_rank() == 1:
            time.sleep(1.5)  # three times as long as nobody asks
        assert_close(reference(batch()), model(batch()), "output")
    with torch.no_grad():
        if dist.get_rank() == 1:
            time.sleep(1.5)
        assert_close(reference(batch()), model(batch()), "output")
    logging.getLogger("shardcore").removeHandler(handler)
    return told


@pytest.mark.nightly
def test_a_rank_that_is_late_is_waited_for_and_its_place_is_told(pool):
    first, _ = pool.run(late)
    assert any("s for others: rank 1 is at " in line and "test_presence.py:" in line for line in first)


def unused():
    _, model = hurried(0)
    presence._ASKS = 5.0
    asked = model._inputs_presence[0]._asked
    for _ in range(30):
        model(batch()).sum().backward()
        time.sleep(0.03)
    return asked, model._inputs_presence[0]._asked


def test_nobody_asks_as_long_as_calls_come_through(pool):
    for before, after in pool.run(unused):
        assert before in (-1, 0)
        assert after == 0


SCRIPT = """
    import sys, time
    sys.path.insert(0, {support!r})
    import shardcore, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    from tiny import batch, twins
    model = twins(fields={{"tp": 2}})[1]
    for _ in range(5):
        model(batch()).sum().backward()
    if dist.get_rank() == 0:
        begin = time.monotonic()
        try:
            {alone}
        finally:
            print(f"took {{time.monotonic() - begin}}", flush=True)
    {then}
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("alone", "then", "said"),
    [
        ("with torch.no_grad(): model(batch())", "", "rank 1 has ended"),
        ("model(batch())", "", "rank 1 has ended"),
        ("model(batch())", "dist.barrier()", "rank 1 waits for this one in torch.distributed.barrier"),
        ("shardcore.save_checkpoint('run', model)", "", "rank 1 has ended"),
        ("shardcore.save_checkpoint('run', model)", "dist.barrier()", "rank 1 waits for this one in torch.dist"),
        ("shardcore.save_checkpoint('run', model)", "model(batch())", "rank "),  # whoever asks first
    ],
    ids=["evaluates", "calls", "calls, barrier", "saves", "saves, barrier", "saves, call"],
)
def test_a_job_ends_in_seconds(tmp_path, alone, then, said):
    """With the times of real life, started as users do."""
    support = str(Path(__file__).parents[1] / "support")
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT).format(support=support, alone=alone, then=then))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode
    assert f"others will not come: {said}" in done.stderr
    took = re.findall(r"took ([\d.]+)", done.stdout)
    # In the last case both ranks are told; where the other one ends first, torchrun ends this one with it.
    assert took or then == "model(batch())"
    assert all(float(seconds) < 20 for seconds in took)
    assert "Aborted" not in done.stderr


def meetings() -> list[int]:
    """Number of keys in the store after some meetings, and after many more."""
    store = dist.distributed_c10d._get_default_store()
    counted = []
    for number in range(40):
        meeting = Meeting.hold([0, 1], {"number": number}, "save_pretrained", patience=10.0)
        assert {rank: report["number"] for rank, report in meeting.reports.items()} == {0: number, 1: number}
        if dist.get_rank() == 0:
            with meeting.telling():
                meeting.proceed()
                meeting.proceed()
        else:
            meeting.follow(0)
            meeting.follow(0)
        if number in (5, 39):
            dist.barrier()
            counted.append(store.num_keys())
            dist.barrier()
    return counted


def test_meetings_leave_nothing_in_the_store(pool):
    for few, many in pool.run(meetings, world=2):
        assert many <= few
