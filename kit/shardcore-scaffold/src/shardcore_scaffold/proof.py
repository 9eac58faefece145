"""A draft goes through the checks of the kit before it is written down, and what differs is taken back.

a policy and its case ----> the kit's quick checks, on two ranks ----> nothing differs
        ^                                 |
        |                                 v
        |     what can be left out (split tokens, stages, ...) is left out; or else
        +---- nothing is split, and then again part by part, as far as the checks hold
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardcore_scaffold.draft import Draft
from shardcore_scaffold.facts import Facts
from shardcore_scaffold.guess import guess
from shardcore_testing.cases import Case
from shardcore_testing.checks import CHECKS, SECTIONS, examine
from shardcore_testing.families import Chosen
from shardcore_testing.pool import WorkerPool
from shardcore_testing.subject import Subject
from shardcore_testing.verify import Job
from shardcore_testing.watching import progress_bar

_RANKS = 2
_LIMIT = 300.0  # seconds for a section
#: A check -> the argument of `guess` that says that a policy is to do without it, and what is left out, in words.
_LEFT_OUT = {
    "sequence": ("sequences", "no sequence parallelism"),
    "sequence modes": ("sequences", "no sequence parallelism"),
    "captured": ("captured", "attention weights and hidden states are refused"),
}
#: A check -> the capabilities that a case need not claim, the least first.
_CLAIMS = {
    "pipeline": ("pipeline",),
    "schedules": ("pipeline",),
    "generation": ("generation",),
    "checkpointing": ("reentrant", "checkpointing"),
}
#: Checks that say nothing of what is split.
_OF_THE_CASE = ("case", "plan", "sizes", "refusals", "communication")

#: Makes the case of a draft, in a folder that the ranks import from and under a name that no draft before it had; names
#: the plugin that has its policy, if any.
Made = Callable[[Path, str, Draft], tuple[Case, str]]
#: What a check says that failed, by its name.
Failures = dict[str, str]


@dataclass
class Settled:
    """A draft whose checks hold.

    Attributes:
        draft: its doubts name what was taken back.
        failed: what fails all the same.
        error: the largest relative difference.
    """

    draft: Draft
    failed: Failures
    error: float


def settled(facts: Facts, made: Made, *, only: Sequence[str] = ()) -> Settled:
    """Return a draft of which the kit's quick checks hold.

    Args:
        facts: of the small model.
        made: makes the case of a draft.
        only: sections of the kit; by default all that ``pytest --quick`` runs.
    """
    with _kit(made, only) as kit:
        trial = _Trial(facts, kit)
        if trial.draft.packs and trial.failed.keys() - _CLAIMS.keys():  # what packs say holds, or it is found out anew
            trial.again(delegated=False)
        trial.leave_out()
        if trial.of_numbers():
            trial.split_less()
            trial.leave_out()
    trial.draft.doubts += trial.doubts
    return Settled(trial.draft, trial.failed, kit.error)


class _Trial:
    """A draft that is changed until the checks of the kit hold."""

    def __init__(self, facts: Facts, kit: _Kit) -> None:
        self.facts, self.kit, self.doubts = facts, kit, list[str]()
        self.how: dict[str, Any] = {}
        self.closed: set[str] = set()
        self.again()

    def again(self, **how: Any) -> None:
        """Draft it with further arguments of `guess`, and run all checks."""
        self.how |= how
        self.draft = self._drafted()
        self.failed = self.kit.failures(self.draft)

    def _drafted(self, **more: Any) -> Draft:
        return self._claiming(guess(self.facts, **self.how | more), self.closed)

    @staticmethod
    def _claiming(draft: Draft, closed: set[str]) -> Draft:
        return replace(draft, closed=closed, stages={} if "pipeline" in closed else draft.stages)

    def of_numbers(self) -> Failures:
        """Return what fails because of what is split, or of what the case says of the class."""
        return {check: said for check, said in self.failed.items() if check not in _OF_THE_CASE}

    def leave_out(self) -> None:
        """Do without what fails and a policy can be without, and do not claim what a case need not claim."""
        if found := {check: said for check, said in self.failed.items() if check in _LEFT_OUT}:
            self.doubts += [f"{_LEFT_OUT[check][1]}: {check}: {_short(said)}" for check, said in found.items()]
            self.again(delegated=False, **{_LEFT_OUT[check][0]: False for check in found})
        before = self.closed
        for check, said in tuple(self.failed.items()):
            for claim in _CLAIMS.get(check, ()):
                closed = self.closed | {claim}
                again = self.kit.failures(self._claiming(self.draft, closed), {CHECKS[check], "plan", "refusals"})
                if again.keys() <= self.failed.keys() - {check}:  # what does not raise either computes something else
                    self.doubts.append(f"{claim} is not claimed: {_short(said)}")
                    self.closed = closed
                    break
        if self.closed != before:
            self.draft = self._claiming(self.draft, self.closed)
            self.failed = self.kit.failures(self.draft, {"plan", "refusals", *(CHECKS[check] for check in self.failed)})

    def split_less(self) -> None:
        """Split as much as the checks allow, but for those that fail even where nothing is split."""
        sections = {CHECKS[check] for check in self.of_numbers()}
        without = self.draft.split

        def differs(**more: Any) -> Failures:
            return self.kit.failures(self._drafted(delegated=False, **more), sections)

        sections -= {CHECKS[check] for check in differs(without=without, tables=False)}
        if not sections:
            return
        said = "; ".join(f"{check}: {_short(text)}" for check, text in self.failed.items() if CHECKS[check] in sections)
        tables = not differs(without=without)
        for region in sorted(without):
            if not differs(without=without - {region}, tables=tables):
                without = without - {region}
        what = [f"{cls}: what ends at {row}" for cls, row in sorted(without)] + ["the vocabulary"] * (not tables)
        self.doubts += [f"{part} is left whole. Split, checks of the kit fail: {said}" for part in what]
        self.again(delegated=False, without=without, tables=tables)


def _short(said: str) -> str:
    return " ".join(said.split())[:200]


class _Kit:
    """Runs sections of the kit on the cases of drafts."""

    def __init__(self, pool: WorkerPool, folder: Path, made: Made, only: Sequence[str]) -> None:
        self._pool, self._folder, self._made, self._only = pool, folder, made, only
        self._drafts, self.error = 0, 0.0

    def failures(self, draft: Draft, sections: Collection[str] = ()) -> Failures:
        """Return what fails, of some sections or of all."""
        self._drafts += 1
        # The folder's name is of this trial alone: modules and registries of an earlier one stay in the process.
        case, plugin = self._made(self._folder, f"{self._folder.name}-{self._drafts}", draft)
        jobs = [job for job in self._jobs(case, plugin) if not sections or job.section in sections]
        failed: Failures = {}
        self.error = 0.0
        with progress_bar(jobs, quiet=bool(self._only)) as (begin, notes):
            for job in jobs:
                begin(job)
                for finding in examine(self._pool, job.subject, job.section, timeout=_LIMIT, notes=notes):
                    self.error = max(self.error, finding.error or 0.0)
                    if finding.state == "failed":
                        failed[finding.check] = finding.message
        return failed

    def _jobs(self, case: Case, plugin: str) -> Iterator[Job]:
        if self._only:
            subject = Subject(case=case, tp=_RANKS, plugin=plugin)
            claimed = [section for section in self._only if getattr(case.supports, section, True)]
            yield from (Job(subject=subject, section=section) for section in claimed)
            return
        news = Chosen(quick=True).news(case, plugin)
        for section, of in SECTIONS.items():
            for tp in of.sizes(case, news, quick=True):
                if tp * of.replicas <= _RANKS:
                    yield Job(subject=Subject(case=case, tp=tp, plugin=plugin, steps=1), section=section)


@contextmanager
def _kit(made: Made, only: Sequence[str]) -> Iterator[_Kit]:
    with tempfile.TemporaryDirectory(prefix="shardcore-draft-") as folder:
        sys.path.insert(0, folder)  # which the ranks take over
        try:
            with WorkerPool(_RANKS, collective_timeout=120.0) as pool:
                yield _Kit(pool, Path(folder), made, only)
        finally:
            sys.path.remove(folder)
