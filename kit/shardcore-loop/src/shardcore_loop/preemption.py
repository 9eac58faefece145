"""Ending a training that was told to stop: every rank hears of it after the same step."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardcore.errors import ConfigError, MissingRanksError

_ASKED = 1 << 10  # in place of a signal's number, all of which are lower


class Preemption:
    """Notices that this job is about to be ended, and tells all ranks so after the same step.

    Schedulers (and torchrun) send a signal some time before they kill, to one process or to all. A rank that stopped
    by itself would leave the others waiting, so all of them ask, once per step, and get the same answer:

    ```python
    with shardcore_loop.Preemption() as preemption:
        for step in range(first, steps):
            train(step)
            if preemption.requested():  # on every rank
                shardcore.save_checkpoint("checkpoints", model, optimizer, step=step)
                break
    ```

    The answer is one all-reduce of 8 bytes between CPUs, which no device waits for: 0.2 ms for two ranks of a machine.
    Where steps take only a few milliseconds, ask after every tenth.

    From here on the signals end nothing by themselves, until the block ends or `close` is called: then the handlers are
    again what they were. A handler that was there before is called too, except for Python's own, which raises
    `KeyboardInterrupt`. A process that is forked meanwhile treats the signals as if this object were not there.

    Args:
        signals: which ones ask for the end; ``signal.SIGUSR1`` is what ``sbatch --signal=USR1@120`` sends, two minutes
            before the time is up.
        group: the ranks that stop together; all if not given. It is not used itself, so that what is in flight on it
            cannot be mixed up with the answer.

    Attributes:
        reason: what asked for the end: the name of a signal, or ``"request()"``. None until `requested` has returned
            True; then the same on all ranks.

    Raises:
        ConfigError: a signal cannot be handled, or this is not the main thread, to which Python gives signals.
    """

    reason: str | None = None

    def __init__(self, signals: Iterable[int] = (signal.SIGTERM,), *, group: ProcessGroup | None = None) -> None:
        self._of = group
        self._group: ProcessGroup | None = None
        self._seen = 0  # the largest number of a signal that came to this process
        self._process = os.getpid()
        self._previous: dict[signal.Signals, Any] = {}
        self._install([_checked(number) for number in signals])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def request(self) -> None:
        """Ask for the end from this process, as a signal does: where a limit of time or a cloud's notice is near."""
        self._seen = max(self._seen, _ASKED)

    def requested(self) -> bool:
        """Tell whether any rank was asked to end; the same on all ranks, each of which makes this call equally often.

        Without a process group, or with one rank, only this process is asked. Once the answer was True it stays, and
        nothing is sent any more.

        Raises:
            MissingRanksError: a rank is gone, or did not make the call for as long as collectives may take.
        """
        if self.reason is None and (seen := self._largest()):
            self.reason = "request()" if seen == _ASKED else signal.Signals(seen).name
        return self.reason is not None

    def close(self) -> None:
        """Give the signals back to the handlers that were there before; a second call does nothing.

        A signal for which somebody has installed another handler since keeps that one.

        Raises:
            ConfigError: this is not the main thread.
        """
        if self._previous:
            _require_main_thread()
        while self._previous:
            number, handler = self._previous.popitem()
            if signal.getsignal(number) == self._handle:
                signal.signal(number, handler)

    def _install(self, numbers: list[signal.Signals]) -> None:
        _require_main_thread()
        for number in numbers:
            previous = signal.getsignal(number)
            try:
                if previous is None:
                    raise OSError("a handler is installed that is no function of Python, and could not be called")
                signal.signal(number, self._handle)
            except OSError as error:
                self.close()
                raise ConfigError(
                    f"{number.name} cannot be handled: {error}. No handler was changed; leave it out of signals="
                ) from error
            self._previous.setdefault(number, previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        previous: Callable[[int, FrameType | None], object] | int | None
        previous = self._previous.get(signal.Signals(number))
        if os.getpid() != self._process:
            # Whoever ends a forked process by a signal waits until it has ended.
            signal.signal(number, signal.SIG_DFL if previous is None else previous)
            signal.raise_signal(number)
            return
        self._seen = max(self._seen, number)
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)

    def _largest(self) -> int:
        """Return the largest number that any rank has seen."""
        if not dist.is_initialized() or dist.get_world_size(self._of) == 1:
            return self._seen
        seen = torch.tensor(self._seen)
        try:
            if self._group is None:
                ranks = None if self._of is None else dist.get_process_group_ranks(self._of)
                self._group = dist.new_group(ranks, backend="gloo", use_local_synchronization=self._of is not None)
            dist.all_reduce(seen, dist.ReduceOp.MAX, group=self._group)
        except RuntimeError as error:
            raise MissingRanksError(
                "Preemption.requested() is a call of all ranks after every step, and at least one of them did not make "
                "it or is gone: the first error of another rank says why. If there is none, see that every rank asks "
                f"equally often, whatever its own data say. Said by torch: {error}"
            ) from error
        return int(seen)


def _checked(number: int) -> signal.Signals:
    try:
        return signal.Signals(number)
    except ValueError as error:
        known = ", ".join(found.name for found in sorted(signal.valid_signals()) if isinstance(found, signal.Signals))
        raise ConfigError(f"signals= has {number!r}, which is no signal; this system has {known}") from error


def _require_main_thread() -> None:
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            f"Preemption was made or closed in the thread {threading.current_thread().name!r}, and Python handles "
            "signals in the main thread alone; do both there. requested() may be called from any thread."
        )
