"""A replica that calls a model with data parallelism alone, or saves it alone, gets an error in seconds."""

from __future__ import annotations

import re
import time

import pytest
import torch
import torch.distributed as dist
from hurry import hurry
from tiny import TinyPolicy, batch, build

import shardcore
from shardcore import MissingRanksError
from shardcore.agree.meeting import Meeting


def trained(**fields):
    hurry()
    model = shardcore.shard(build(), policy=TinyPolicy(), **fields)
    for step in range(2):
        model(batch(step)).sum().backward()
    dist.barrier()
    return model


def calls_while_others_wait(fields, backward):
    model = trained(**fields)
    output = model(batch()).sum() if backward else None
    if shardcore.mesh.context_of(model).replica == 0:
        output.backward() if backward else model(batch())
    else:
        Meeting.hold(list(range(dist.get_world_size())), {}, "save_pretrained", patience=5.0)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fields", "backward"), [({"dp": 2}, False), ({"tp": 2, "dp": 2}, True)], ids=["dp", "tp, dp, backward"]
)
def test_a_replica_that_calls_alone_is_told_where_the_others_wait(pool, fields, backward):
    with pytest.raises(Exception, match="others will not come") as caught:
        pool.run(calls_while_others_wait, fields, backward, world=2 * fields.get("tp", 1), timeout=60)
    assert {failure.error for failure in caught.value.failures} == {"MissingRanksError"}


def saves_while_others_train(folder):
    model = trained(dp=2)
    if dist.get_rank() == 0:
        shardcore.save_checkpoint(folder, model)
    else:
        model(batch()).sum().backward()


@pytest.mark.nightly
def test_a_replica_that_saves_alone_is_an_error_on_all(pool, tmp_path):
    with pytest.raises(Exception, match="others will not come") as caught:
        pool.run(saves_while_others_train, str(tmp_path / "run"), timeout=60)
    assert [failure.error for failure in caught.value.failures] == ["MissingRanksError"] * 2
    assert not (tmp_path / "run").exists()


def evaluates_alone():
    """Whole copies need nobody in a forward, whatever the others are at."""
    model = trained(tp=1, dp_replicate_size=2)
    if dist.get_rank() == 0:
        with torch.no_grad():
            first = model(batch())
            handle = model.register_forward_pre_hook(lambda *_: time.sleep(2.0))  # long enough to ask, and to be sure
            assert torch.equal(model(batch()), first)
            handle.remove()
            assert torch.equal(model(batch()), first)
    dist.barrier()
    model(batch()).sum().backward()
    return [presence.failed for presence in shardcore.mesh.context_of(model).presences]


def test_a_whole_copy_may_be_called_alone(pool):
    assert pool.run(evaluates_alone, timeout=60) == [[False], [False]]


def is_late():
    model = trained(dp=2)
    if dist.get_rank() == 1:
        time.sleep(1.5)  # three times as long as nobody asks
    model(batch()).sum().backward()
    dist.barrier()
    return model._inputs_presence[0].failed


def test_a_replica_that_is_late_is_waited_for(pool):
    assert pool.run(is_late, timeout=60) == [False, False]


def counts():
    model = trained(dp=2)
    transport = shardcore.mesh.context_of(model).data
    before = transport.sent
    model(batch()).sum().backward()
    return transport.sent - before, sum(1 for _ in model.modules() if isinstance(_, torch.distributed.fsdp.FSDPModule))


def test_what_fsdp_sends_is_counted(pool):
    for sent, units in pool.run(counts):
        assert sent > units > 1  # each one gathers in the forward and scatters in the backward


def test_a_meeting_that_was_given_up_says_for_how_long_it_was_waited_for(pool):
    said, _ = pool.run(meets_alone, timeout=30)
    assert re.search(r"did not come: 1 \(this one has waited for \d s; the timeout of the process group is 1 s\)", said)


def meets_alone():
    if dist.get_rank() == 0:
        with pytest.raises(MissingRanksError) as caught:
            Meeting.hold([0, 1], {}, "save_pretrained", patience=1.0)
        assert caught.value.missing == (1,)
        return str(caught.value)
    return ""


def evaluates_unevenly(folder):
    """Copies of the model may evaluate other numbers of batches, load slowly, and save late."""
    model = trained(dp_shard_size=2, dp_replicate_size=2)
    context, rank = shardcore.mesh.context_of(model), dist.get_rank()
    with torch.no_grad():
        for step in range(2 if context.mesh.get_coordinate()[0] else 4):
            if rank == 1 and step == 3:
                time.sleep(2.0)
            model(batch(step))
    dist.barrier()
    for step in range(2):
        if rank == 1 and step:
            time.sleep(2.0)
        model(batch(step)).sum().backward()
    if rank == 1:
        time.sleep(2.0)
    shardcore.save_checkpoint(folder, model)
    return [presence.failed for presence in context.presences]


def test_copies_of_divided_parameters_need_each_other_in_no_forward(pool, tmp_path):
    found = pool.run(evaluates_unevenly, str(tmp_path / "run"), world=4, timeout=90)
    assert found == [[False, False]] * 4  # those that share parameters, and all


def saves_one_copy(folder):
    model = trained(tp=1, dp_replicate_size=2)
    if dist.get_rank() == 0:
        shardcore.save_checkpoint(folder, model)
    else:
        dist.barrier()


@pytest.mark.nightly
def test_a_copy_that_saves_alone(pool, tmp_path):
    with pytest.raises(Exception, match=r"rank 1 waits for this one in torch\.distributed\.barrier") as caught:
        pool.run(saves_one_copy, str(tmp_path / "run"), timeout=60)
    assert [failure.error for failure in caught.value.failures] == ["MissingRanksError"]


def calls_while_another_receives(kind):
    model = trained(dp=2)
    if dist.get_rank() == 0:
        model(batch())
    elif kind == "tensor":
        dist.broadcast(torch.zeros(3), src=0)
    else:
        dist.broadcast_object_list([None], src=0)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["tensor", "object"])
def test_who_evaluates_alone_and_would_send_the_result_is_told(pool, kind):
    with pytest.raises(Exception, match=r"rank 1 waits for this one in torch\.distributed\.broadcast") as caught:
        pool.run(calls_while_another_receives, kind, timeout=60)
    assert [failure.error for failure in caught.value.failures] == ["MissingRanksError"]
