"""The sections of the conformance kit: what runs on the ranks in one call, and the checks that it makes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch.distributed as dist

from shardcore.errors import PlanError
from shardcore_testing import (
    checks_calls,
    checks_data,
    checks_experts,
    checks_inside,
    checks_loading,
    checks_logits,
    checks_pipeline,
    checks_plan,
    checks_random,
    checks_ranks,
    checks_resume,
    checks_sequence,
    checks_state,
    checks_training,
)
from shardcore_testing.cases import Case
from shardcore_testing.families import News
from shardcore_testing.findings import Finding, Ledger, worst
from shardcore_testing.islands import in_float64
from shardcore_testing.pool import WorkerError, WorkerPool, WorkerTimeout, place
from shardcore_testing.subject import Subject, torch_lacks


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """What runs on all ranks in one call.

    Attributes:
        run: compares and writes down.
        checks: the names of the checks that it makes.
        alone: it runs on one rank too.
        several: it runs on several ranks too.
        quick: what a case has to show with ``--quick`` that no earlier one of the session has: numbers, which are
            compared, a signature of its plan, a kind of step, mixin or layout (which is enough for a mechanism), or a
            kind of layout (for what is the same around any block, or saved). See `shardcore_testing.families`.
        whole: the same without ``--quick``, in a pack: nothing, since what it compares is the class's own, such as a
            loss; a family, where its policy decides it, or a kind; a kind; or a kind of layout.
        claim: the capability that it is about: it runs for the cases that claim it.
        replicas: how many replicas of that many ranks it runs on.
    """

    run: Callable[[Subject, Ledger], None]
    checks: tuple[str, ...]
    alone: bool = False
    several: bool = True
    quick: Literal["numbers", "signature", "kind", "layout"] = "kind"
    whole: Literal["every", "family", "kind", "layout"] = "family"
    claim: str = ""
    replicas: int = 1

    def sizes(self, case: Case, news: Mapping[int, News], *, quick: bool) -> list[int]:
        """Return the sizes at which a conformance test runs it for a case; replicas have as many ranks.

        A mechanism is shown at each size at which the plan is new; where kinds are, by replicas of two ranks too.

        Args:
            case: the case.
            news: what the case shows, by size, smallest first.
            quick: whether ``--quick`` was given.
        """
        if self.claim and not getattr(case.supports, self.claim):
            return []
        smallest = min(news)
        new = [size for size, of in news.items() if self._runs(of, quick=quick, smallest=size == smallest)]
        if not new:
            return []
        if self.replicas > 1:
            return [1, 2] if not quick and 2 in news and news[2].kind else [1]
        several = [size for size in new if size > 1] if self.several else []
        return [1, *several] if self.alone and (not several or news[smallest].kind) else several

    def _runs(self, news: News, *, quick: bool, smallest: bool) -> bool:
        if quick:
            return bool(getattr(news, self.quick))
        if self.whole == "every":
            return smallest or (news.numbers if self.quick == "numbers" else news.kind)
        return bool(getattr(news, self.whole)) or (self.whole == "family" and news.kind)


SECTIONS: Mapping[str, Section] = {
    "case": Section(run=checks_plan.case, checks=("case",), alone=True, several=False, quick="numbers", whole="every"),
    "plan": Section(run=checks_plan.plan, checks=("plan",), alone=True, quick="numbers", whole="every"),
    "sizes": Section(run=checks_plan.sizes, checks=("sizes",), alone=True, several=False),
    "pipeline": Section(run=checks_pipeline.pipeline, checks=("pipeline",), alone=True, several=False),
    "schedules": Section(run=checks_pipeline.schedules, checks=("schedules",), quick="layout", whole="every"),
    "identity": Section(run=checks_plan.identity, checks=("twin", "interface")),
    "training": Section(
        run=checks_training.training, checks=checks_training.TRAINING, alone=True, quick="numbers", whole="every"
    ),
    "one row": Section(run=checks_calls.one_row, checks=("one row",)),
    "parts": Section(run=checks_calls.parts, checks=("parts",), quick="layout"),
    "inside": Section(run=checks_inside.inside, checks=("inside",), whole="kind"),
    "data parallel": Section(
        run=checks_data.data_parallel, checks=("data parallel",), alone=True, replicas=2, whole="kind"
    ),
    "experts": Section(
        run=checks_data.experts, checks=("experts",), alone=True, replicas=2, claim="experts", quick="signature"
    ),
    "default experts": Section(
        run=checks_experts.default_experts, checks=("default experts",), claim="experts", quick="signature"
    ),
    "ranks differ": Section(run=checks_ranks.ranks_differ, checks=("ranks differ",), quick="layout", whole="kind"),
    "options": Section(run=checks_training.options, checks=("options",), quick="layout"),
    "checkpointing": Section(run=checks_training.recomputation, checks=("checkpointing",)),
    "communication": Section(run=checks_training.communication, checks=("communication",)),
    "dropout": Section(run=checks_random.dropout, checks=("dropout",)),
    "replicas": Section(run=checks_random.replicas, checks=("replicas",), whole="kind"),
    "state": Section(run=checks_state.state, checks=("state dict",), quick="layout", whole="layout"),
    "checkpoint": Section(run=checks_state.checkpoint, checks=("checkpoint",), quick="layout", whole="layout"),
    "resume": Section(run=checks_resume.resume, checks=("resume",), quick="layout", whole="layout"),
    "loading": Section(run=checks_loading.loading, checks=("loading",)),
    "initialisation": Section(
        run=checks_loading.initialisation, checks=("initialisation",), quick="layout", whole="layout"
    ),
    "saving": Section(run=checks_state.saving, checks=("save_pretrained",), quick="layout"),
    "captured": Section(run=checks_state.captured, checks=("captured",), whole="every"),
    "generation": Section(run=checks_random.generation, checks=("generation",), whole="every"),
    "sequence": Section(run=checks_sequence.sequence, checks=("sequence",)),
    "sequence modes": Section(run=checks_sequence.sequence_modes, checks=("sequence modes",), quick="layout"),
    "context": Section(
        run=checks_sequence.context, checks=("context",), alone=True, several=False, replicas=2, claim="context"
    ),
    "split logits": Section(run=checks_logits.split_logits, checks=("split logits",), quick="layout"),
    "refusals": Section(run=checks_plan.refusals, checks=("refusals", "closed"), quick="layout"),
}

#: Name of a check -> its section.
CHECKS: Mapping[str, str] = {check: name for name, section in SECTIONS.items() for check in section.checks}


def sections_for(tp: int) -> list[str]:
    """Return the names of the sections that run at a size; several replicas are ranks of at most two each."""
    return [
        name
        for name, section in SECTIONS.items()
        if (section.alone if tp == 1 else section.several) and (section.replicas == 1 or tp <= 2)
    ]


def examine(
    pool: WorkerPool, subject: Subject, section: str, *, timeout: float = 120.0, notes: Path | None = None
) -> list[Finding]:
    """Run one section of one subject and return a finding for each of its checks.

    A rank that raises, dies or hangs is a failure of the check that it was at. The first rank writes what it is
    at into ``notes``, for whoever looks.
    """
    subject = replace(subject, dp=SECTIONS[section].replicas)
    try:
        return worst(pool.run(_on_rank, subject, section, notes, world=subject.tp * subject.dp, timeout=timeout))
    except (WorkerError, WorkerTimeout) as error:
        return _broken(section, error)


def _on_rank(subject: Subject, name: str, notes: Path | None = None) -> list[Finding]:
    section = SECTIONS[name]

    def note(text: str) -> None:
        if notes is not None:
            notes.write_text(text)

    watched = notes is not None and dist.get_rank() == 0
    ledger = Ledger(section.checks, subject.case.tolerance, note if watched else None)
    logging.getLogger("transformers").setLevel(logging.ERROR)  # its advice about the tiny models of tests
    try:
        with in_float64():
            section.run(subject, ledger)
    except PlanError as error:
        lacks = torch_lacks(error)
        if lacks is None:
            raise SectionStopped(ledger.findings()) from error
        return [Finding(check=check, state="closed", message=lacks) for check in section.checks]
    except Exception as error:
        raise SectionStopped(ledger.findings()) from error
    return ledger.findings()


class SectionStopped(Exception):  # noqa: N818  # named for what happened
    """A section ended before its end on this rank; carries its findings as text."""

    def __init__(self, findings: list[Finding]) -> None:
        failed = [f"{_MARK}{f.check}\t{f.message!r}" for f in findings if f.state == "failed"]
        super().__init__("\n".join(["a section of the conformance kit ended early", *failed]))


_MARK = "conformance-check: "


def _broken(name: str, error: WorkerError | WorkerTimeout) -> list[Finding]:
    """Return the findings of a section that did not come to its end."""
    import ast

    said: dict[str, dict[str, str]] = {}  # of each check, what a rank said, by that: what several said is shown once
    for failure in getattr(error, "failures", ()):
        for line in failure.details.splitlines():
            if line.startswith(_MARK):
                check, _, text = line.removeprefix(_MARK).partition("\t")
                words = ast.literal_eval(text)
                unknown = words.startswith("not reached")
                said.setdefault(check, {}).setdefault(words, words if unknown else f"rank {failure.rank}: {words}")
    # Where the others were tells why one of them waited in vain.
    places = [f"rank {rank} was in {place(stacks)}" for rank, stacks in error.stacks.items()]
    messages: dict[str, str] = {}
    for check, of_ranks in said.items():
        # Who knows more than that it did not get there is heard alone.
        knows = [line for words, line in of_ranks.items() if not words.startswith("not reached")]
        messages[check] = "\n".join([*knows, *places] if knows else [*of_ranks.values()])
    if not messages:  # it hung, or died without a word
        messages = dict.fromkeys(SECTIONS[name].checks, f"not reached: {error}")
    return [
        Finding(check=check, state="failed", message=messages[check])
        if check in messages
        else Finding(check=check, state="passed", compared=1)
        for check in SECTIONS[name].checks
    ]
