"""Being told to stop: who hears of it, and what becomes of the signals."""

from __future__ import annotations

import contextlib
import os
import signal
import threading

import pytest
import torch.distributed as dist

from shardcore.errors import ConfigError, MissingRanksError
from shardcore_loop import Preemption
from shardcore_testing.pool import WorkerError

KINDS = (signal.SIGTERM, signal.SIGUSR1)


@pytest.fixture(autouse=True)
def _handlers():
    """Whatever a test leaves behind, the next one finds the handlers as they were."""
    before = {number: signal.getsignal(number) for number in (*KINDS, signal.SIGINT)}
    yield
    left = {number: signal.getsignal(number) for number in before}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert left == before


def test_one_process_is_asked_by_a_signal():
    with Preemption() as preemption:
        assert not preemption.requested()
        assert preemption.reason is None
        signal.raise_signal(signal.SIGTERM)
        assert preemption.reason is None
        assert preemption.requested()
        assert preemption.requested()
        assert preemption.reason == "SIGTERM"


def test_one_process_is_asked_by_a_call():
    with Preemption(signals=()) as preemption:
        preemption.request()
        assert preemption.requested()
        assert preemption.reason == "request()"


def test_the_signals_that_were_named():
    with Preemption(signals=KINDS) as preemption:
        signal.raise_signal(signal.SIGUSR1)
        assert preemption.requested()
        assert preemption.reason == "SIGUSR1"


def test_handlers_are_given_back_also_after_an_error():
    before = [signal.getsignal(number) for number in KINDS]
    with contextlib.suppress(ZeroDivisionError), Preemption(signals=(*KINDS, *KINDS)):
        assert [signal.getsignal(number) for number in KINDS] != before
        raise ZeroDivisionError
    assert [signal.getsignal(number) for number in KINDS] == before


def test_a_handler_that_was_there_before_is_called():
    called = []
    signal.signal(signal.SIGUSR1, lambda number, _frame: called.append(number))
    mine = signal.getsignal(signal.SIGUSR1)
    outer = Preemption(signals=(signal.SIGUSR1,))
    with Preemption(signals=(signal.SIGUSR1,)) as inner:
        signal.raise_signal(signal.SIGUSR1)
    assert called == [signal.SIGUSR1]
    assert inner.requested()
    assert outer.requested()
    outer.close()
    assert signal.getsignal(signal.SIGUSR1) is mine
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_pythons_own_handler_of_interrupts_is_not_called():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background are started without it
    try:
        interrupted()
    finally:
        signal.signal(signal.SIGINT, before)


def interrupted():
    with Preemption(signals=(signal.SIGINT,)) as preemption:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:  # which would end pytest
            pytest.fail("Python's own handler was called")
        assert preemption.requested()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_handler_that_came_later_stays():
    preemption = Preemption(signals=(signal.SIGUSR1,))
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    preemption.close()
    preemption.close()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_a_forked_process_ends_by_the_signal_as_ever():
    with Preemption() as preemption:
        if (child := os.fork()) == 0:
            signal.raise_signal(signal.SIGTERM)
            os._exit(3)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status)
        assert os.WTERMSIG(status) == signal.SIGTERM
        assert not preemption.requested()


@pytest.mark.parametrize(
    ("signals", "message"),
    [
        ((signal.SIGUSR1, 999), r"signals= has 999, which is no signal; this system has SIGHUP, SIGINT, .*SIGTERM"),
        ((signal.SIGUSR1, signal.SIGKILL), r"SIGKILL cannot be handled: .*No handler was changed; leave it out of"),
    ],
)
def test_a_signal_that_cannot_be_handled(signals, message):
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(ConfigError, match=message):
        Preemption(signals=signals)
    assert signal.getsignal(signal.SIGUSR1) == before


def test_another_thread():
    told = []

    def make():
        with pytest.raises(ConfigError) as caught:
            Preemption()
        told.append(str(caught.value))

    thread = threading.Thread(target=make, name="loader")
    thread.start()
    thread.join()
    assert told[0].startswith("Preemption was made or closed in the thread 'loader', and Python handles signals in the")


def told_in_turn():
    """Two ranks, three steps; the second rank is told during its second step."""
    answers = []
    with Preemption() as preemption:
        for step in range(3):
            if dist.get_rank() == 1 and step == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            answers.append((preemption.requested(), preemption.reason))
    return answers


def test_all_ranks_hear_of_it_after_the_same_step(pool):
    stopped = (True, "SIGTERM")
    assert pool.run(told_in_turn, world=2) == [[(False, None), stopped, stopped]] * 2


def different_reasons():
    with Preemption(signals=KINDS) as preemption:
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
        else:
            preemption.request()
        return preemption.requested(), preemption.reason


def test_all_ranks_say_the_same_reason(pool):
    assert pool.run(different_reasons, world=2) == [(True, "request()")] * 2


def one_half():
    half = dist.get_rank() // 2
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    with Preemption(group=groups[half]) as preemption:
        if dist.get_rank() == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return preemption.requested()


def test_the_ranks_of_a_group_stop_without_the_others(pool):
    assert pool.run(one_half, world=4) == [False, False, True, True]


def beside_other_traffic():
    """What is in flight on the group of all ranks is not mixed up with the answer."""
    import torch

    mine = torch.full((4,), float(dist.get_rank() + 1))
    with Preemption() as preemption:
        assert not preemption.requested()
        work = dist.all_reduce(mine, async_op=True) if dist.get_rank() == 0 else None
        answer = preemption.requested()
        work = work or dist.all_reduce(mine, async_op=True)
        work.wait()
    return answer, mine.tolist()


def test_the_answer_has_a_channel_of_its_own(pool):
    assert pool.run(beside_other_traffic, world=2) == [(False, [3.0] * 4)] * 2


def one_is_gone():
    with Preemption() as preemption:
        preemption.requested()
        if dist.get_rank() == 1:
            os._exit(7)
        preemption.requested()


def test_a_rank_that_is_gone(pool):
    with pytest.raises(WorkerError) as caught:
        pool.run(one_is_gone, world=2)
    told = [str(failure) for failure in caught.value.failures]
    assert any(MissingRanksError.__name__ in text and "requested() is a call of all ranks" in text for text in told)
