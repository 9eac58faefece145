"""Ranks that share a model compare what they are called with: another batch on one of them is an error on all."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from tiny import TinyLM, batch, build, randomize, shard, twins

import shardcore
from shardcore import AgreementError, ConfigError, NotSupportedError, ShardConfig
from shardcore.apply.call_checks import _are_apart
from shardcore.mesh.context import context_of
from shardcore.nn.same_inputs import _is_due
from shardcore_testing import WorkerError, WorkerPool
from shardcore_testing.observing import Collectives
from shardcore_testing.parity import assert_close


def fails(**kinds):
    """Return the error of a call, and make sure that the model still works."""
    reference, model = twins(fields={"tp": 2, **kinds.pop("fields", {})})
    calls = kinds.pop("before", 0)
    for seed in range(calls):
        model(batch(seed))
    rank = dist.get_rank()
    kwargs = {name: make(rank) for name, make in kinds.items()}
    with pytest.raises(AgreementError) as caught:
        model(**kwargs)
    assert_close(reference(batch()), model(batch()), "the next call")
    return str(caught.value)


def other_values():
    return fails(ids=batch)


def other_values_further_on():
    def ids(rank):
        found = batch()
        found[-1, -1] += rank
        return found

    return fails(ids=ids)


def other_lengths():
    return fails(ids=lambda rank: batch(length=8 + rank))


def other_arguments():
    return fails(ids=lambda rank: batch(), labels=lambda rank: batch() if rank else None)


def other_lengths_of_what_needs_a_gradient():
    return fails(inputs=lambda rank: torch.zeros(2, 3 + rank, 24, dtype=torch.float64, requires_grad=True))


def other_values_of_what_needs_a_gradient():
    """As a model computes them that is not sharded itself: they may differ by what rounding does, and by no more."""

    def inputs(seed, noise):
        computed = torch.randn(2, 3, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        return (computed * (1 + noise)).requires_grad_()

    twins(fields={"tp": 2})[1](inputs=inputs(0, 1e-4 * dist.get_rank()))
    return fails(inputs=lambda rank: inputs(rank, 0))


def other_values_later():
    return fails(ids=batch, before=4, fields={"check_inputs_every": 2})


SAID = {
    other_values: "ids is int64 (3, 8) that begins with",
    other_values_further_on: "with other values further on",
    other_lengths: "int64 (3, 9) that begins with",
    other_arguments: "labels is None on rank 0, and int64 (3, 8)",
    other_lengths_of_what_needs_a_gradient: "inputs is float64 (2, 3, 24) on rank 0, and float64 (2, 4, 24) on rank 1",
    other_values_of_what_needs_a_gradient: "inputs is float64 (2, 3, 32) with the sum ",
    other_values_later: "ids is int64 (3, 8) that begins with",
}


@pytest.mark.parametrize("case", SAID, ids=lambda case: case.__name__)
def test_other_inputs_are_an_error_on_all_ranks(pool, case):
    first, second = pool.run(case)
    assert first == second
    assert SAID[case] in first
    assert "divide data by replicas" in first


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("here", "there", "apart"),
    [
        ([1.0, 2.0], [1.0 + 1e-9, 2.0], False),
        ([1.0, 2.0], [1.1, 2.0], True),
        ([1.0, 2.0], [INF, INF], True),
        ([1.0, 2.0], [NAN, INF], True),
        ([1.0, 2.0], [NAN, NAN], True),
        ([INF, INF], [-INF, INF], True),
        ([INF, INF], [NAN, INF], True),
        ([INF, INF], [INF, INF], False),
        ([NAN, NAN], [NAN, NAN], False),
    ],
)
def test_what_is_infinite_or_no_number_on_one_rank_is_a_difference(here, there, apart):
    assert _are_apart([*here, 1e-7], [*there, 1e-7]) == _are_apart([*there, 1e-7], [*here, 1e-7]) == apart


def goes_on():
    model = twins(fields={"tp": 2, "check_inputs_every": 3})[1]
    rank = dist.get_rank()
    for seed in range(3):
        model(batch(seed))
    with pytest.raises(AgreementError):
        model(batch(rank))  # the fourth call: its number, from 0, is 3
    model(batch(rank)), model(batch(rank))
    with pytest.raises(AgreementError):
        model(batch(rank))
    never = twins(fields={"tp": 2, "check_inputs_every": 0})[1]
    never(batch(rank))


def test_ranks_that_part_early_are_found_early():
    assert [number for number in range(250) if _is_due(number, 100)] == [0, 1, 2, 3, 7, 15, 31, 63, 100, 127, 200]


def test_every_so_often(pool):
    pool.run(goes_on)


def one_number():
    reference, model = twins(fields={"tp": 2})
    one = batch(length=8)[:1, :1]  # contiguous, with a stride of 8 between what would be the next numbers
    column = torch.as_strided(one, (1, 1), (1, 8))
    assert_close(reference(column), model(column), "a batch of one token")


def test_a_batch_of_one_number_has_any_strides(pool):
    pool.run(one_number)


def of_replicas():
    reference, model = twins(fields={"tp": 2, "dp": 2})
    part = context_of(model).replica
    ids = batch(part, rows=2 + part)
    with Collectives() as sent, torch.no_grad():
        assert_close(reference(ids), model(ids), "output")
    return sent.counts


def test_replicas_have_batches_of_their_own(pool):
    pool.run(of_replicas, world=4)


def sends():
    counts = []
    for every in (0, 1):
        model = twins(fields={"tp": 2, "check_inputs_every": every})[1]
        with Collectives() as sent:
            model(batch()).sum().backward()
        counts.append(sent.counts)
    return counts


def test_it_sends_nothing(pool):
    for never, always in pool.run(sends):
        assert never == always


class Answers(TinyLM):
    """A model that is told what its caller wants back, as those of transformers are."""

    def forward(self, ids, labels=None, return_dict=None, use_cache=True):
        return super().forward(ids, labels=labels)


def many_calls():
    """Calls that are all compared, of ranks that want other things back; return how many keys the store has."""
    reference, model = (Answers(build().config).double() for _ in range(2))
    for m in (reference, model):
        randomize(m)
    shard(model, tp=2, check_inputs_every=1)
    store = dist.distributed_c10d._get_default_store()
    mine = ({}, {"return_dict": True}, {"use_cache": False})
    keys = []
    for number in range(12):
        for m in (reference, model):
            m.train(number % 4 < 2)
        wants = mine[number % 3] if dist.get_rank() else {}
        assert_close(reference(batch(number)), model(batch(number), **wants), "output")
        if number in (3, 11):
            dist.barrier()
            keys.append(store.num_keys())
            dist.barrier()
    return keys


def test_calls_leave_no_keys_and_ranks_may_want_other_things_back(pool):
    for few, many in pool.run(many_calls):
        assert many - few < 8  # one for each call between; signs of life come with time


@pytest.mark.parametrize("value", [-1, True, 1.5, None], ids=str)
def test_the_setting(value):
    with pytest.raises(ConfigError, match=r"check_inputs_every must be a number of calls, or 0 for never"):
        ShardConfig(check_inputs_every=value)


def test_a_model_on_one_rank_compares_nothing():
    model = shard(twins(fields={"tp": 1})[0], tp=1)
    assert "_inputs_calls" not in model.__dict__
    assert shardcore.ShardConfig().check_inputs_every == 100


def two_threads():
    """The second one comes while the first compares: in the first calls ranks wait for each other there."""
    reference, model = twins(fields={"tp": 2})
    errors = []

    def other():
        try:
            model(batch(1))
        except NotSupportedError as error:
            errors.append(error)

    meet = model._inputs_meet

    def meanwhile(brought):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        meet(brought)

    model.__dict__["_inputs_meet"] = meanwhile
    assert_close(reference(batch()), model(batch()), "the call of the first thread")
    model.__dict__["_inputs_meet"] = meet
    assert [str(error)[:11] for error in errors] == ["two threads"]
    assert_close(reference(batch()), model(batch()), "the next call")


def test_a_second_thread_is_refused_in_the_first_calls_too(pool):
    pool.run(two_threads, world=2, timeout=60)


def without_values():
    with torch.device("meta"):
        models = [shard(build())]
    models.append(shard(build()))
    models[1].register_buffer("scale", torch.ones(2, device="meta"))
    for model, name in zip(models, ("model.positions", "scale"), strict=True):
        with pytest.raises(NotSupportedError, match=rf"its {name} is on meta, without values: .*initialize"):
            model(batch())


def test_a_model_without_values_is_not_called(pool):
    pool.run(without_values, world=2)


def looks_up():
    """A model that is not sharded itself looks up embeddings: their sum over the ranks is of neither rank's batch."""
    reference, model = twins(fields={"tp": 2})
    table = model.model.embed
    with pytest.raises(AgreementError) as caught:
        table(batch(dist.get_rank()))
    assert_close(reference.model.embed(batch()), table(batch()), "the next lookup")
    assert_close(reference(batch()), model(batch()), "a call of the model")
    return str(caught.value)


def test_embeddings_that_are_looked_up_outside_of_the_model(pool):
    for said in pool.run(looks_up):
        assert "the argument at position 0 is int64 (3, 8) that begins with" in said


def steps_alone():
    model = twins(fields={"tp": 2})[1]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    model(batch(), labels=batch()).backward()
    optimizer.step()
    model(batch())
    if dist.get_rank() == 0:
        optimizer.step()
    with pytest.raises(AgreementError) as caught:
        model(batch())
    return str(caught.value)


def test_a_step_of_one_rank_alone(pool):
    for said in pool.run(steps_alone):
        assert "have other values of the parameters that each of them has whole: with the sum " in said
        assert "a step of an optimizer" in said


def other_kinds_of_calls():
    _, model = twins(fields={"tp": 2})
    rank = dist.get_rank()
    with torch.set_grad_enabled(rank == 1), pytest.raises(AgreementError) as caught:
        model.train(rank == 1)(batch(rank))
    return str(caught.value)


def test_other_kinds_of_calls_are_told_as_such(pool):
    for said in pool.run(other_kinds_of_calls):
        assert "rank 0 makes a call in evaluation mode, without gradients, and rank 1 a call in training mode" in said
        assert "`if rank == 0`" in said
        assert "divide data" not in said


def evaluates_while_the_other_one_trains():
    _, model = twins(fields={"tp": 2})
    for step in range(5):
        model(batch(step)).sum().backward()
    # Nothing but their kind tells the two calls apart; what the other one sends would be taken for an answer.
    with torch.set_grad_enabled(dist.get_rank() == 1):
        model(batch())


@pytest.mark.nightly
def test_a_rank_that_evaluates_alone_takes_nothing_for_an_answer():
    """It waits for the others for as long as the process group lets it, and so do they."""
    with WorkerPool(collective_timeout=3.0) as pool, pytest.raises(WorkerError) as caught:
        pool.run(evaluates_while_the_other_one_trains, world=2)
    errors = {failure.rank: failure for failure in caught.value.failures}
    assert errors[0].error == "MissingRanksError"
    assert "was called on some of the ranks that share it, and these did not come: 1." in str(caught.value)
