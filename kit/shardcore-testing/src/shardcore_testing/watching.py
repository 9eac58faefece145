"""The progress of ``shardcore verify`` at a terminal: how many checks are done, and what the ranks are at."""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from typing_extensions import override

from shardcore_testing.checks import SECTIONS
from shardcore_testing.verify import Job


class Steps:
    """How many checks are done, told by what the ranks write down.

    Args:
        jobs: all that there is to do.
    """

    def __init__(self, jobs: Iterable[Job]) -> None:
        self.total = sum(len(SECTIONS[job.section].checks) for job in jobs)
        self._before = 0
        self._checks: tuple[str, ...] = ()
        self._seen: set[str] = set()

    @property
    def started(self) -> bool:
        """Whether the ranks have come to a check."""
        return bool(self._before or self._seen)

    def begin(self, job: Job) -> None:
        """Say that a job begins, and that the one before it has ended."""
        self._before += len(self._checks)
        self._checks = SECTIONS[job.section].checks
        self._seen.clear()

    def done(self, note: str) -> int:
        """Return how many checks are done while the ranks say ``note``; the check that they are at is not."""
        check = re.split("[,:]", note, maxsplit=1)[0]
        if check in self._checks:
            self._seen.add(check)
        return self._before + max(len(self._seen) - 1, 0)


@contextlib.contextmanager
def progress_bar(jobs: Sequence[Job], *, quiet: bool) -> Iterator[tuple[Callable[[Job], None], Path | None]]:
    """Yield what shows that a job begins, and a file that is read: a bar on a terminal, nothing in a pipe.

    Before the first check the bar has no end and moves by itself; then it counts checks.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda job: None, None
        return
    from rich.console import Console, RenderableType
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeElapsedColumn,
    )
    from rich.table import Column
    from rich.text import Text

    steps = Steps(jobs)
    with tempfile.TemporaryDirectory(prefix="shardcore-verify-") as folder:
        notes = Path(folder, "notes")

        class Now(ProgressColumn):
            @override
            def render(self, task: Task) -> Text:
                return Text(task.fields["now"], style="dim", no_wrap=True, overflow="ellipsis")

        class Watching(Progress):
            @override
            def get_renderables(self) -> Iterable[RenderableType]:
                for task in self.tasks:
                    with contextlib.suppress(OSError):
                        task.fields["now"] = notes.read_text() or task.fields["now"]  # it may be written just now
                    task.completed = steps.done(task.fields["now"])
                    task.total = steps.total if steps.started else None
                return super().get_renderables()

        now = Now(table_column=Column(no_wrap=False))  # it alone gives way where there is no room
        columns = (TextColumn("{task.description}"), BarColumn(12), MofNCompleteColumn(), TimeElapsedColumn(), now)
        with Watching(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=None, now="")

            def begin(job: Job) -> None:
                steps.begin(job)
                bar.update(task, description=str(job.subject))

            yield begin, notes
