"""What the conformance kit found out: one finding for each check, from every rank."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

State = Literal["passed", "failed", "closed"]

_HAZARD = re.compile(r"\bH\d+\b")

_SHOWN = 8  # messages of one check; the rest is counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The outcome of one check.

    Attributes:
        check: its name.
        state: ``passed``, ``failed``, or ``closed`` for a capability that the pack does not claim.
        compared: how many things were compared.
        error: the largest relative difference; None if nothing numeric was compared.
        where: where that was.
        message: why it failed, or what is closed.
        allowed: the largest relative difference that would have passed there; None as ``error``.
    """

    check: str
    state: State
    compared: int = 0
    error: float | None = None
    where: str = ""
    message: str = ""
    allowed: float | None = None

    @property
    def hazards(self) -> tuple[str, ...]:
        """The numbers of the hazards that the message names, such as ``H6``: headings of ``docs/hazards.md``."""
        return tuple(dict.fromkeys(_HAZARD.findall(self.message)))

    def explained(self) -> str:
        """Return the message, and below it where the hazards that it names are explained."""
        where = ", ".join(f"docs/hazards.md#{number.lower()}" for number in self.hazards)
        return f"{self.message}\nSee {where}" if where else self.message


class Ledger:
    """Collects what a section compares. A difference is written down and does not end the section, so that all ranks
    go on to the same collectives; an exception ends it.

    Args:
        checks: every check that the section makes. One that it did not come to is a failure.
        tolerance: the largest relative difference allowed.
        note: told, while the section runs, which check it is at and how many things it has compared.
    """  # noqa: D205  # one thought

    def __init__(self, checks: tuple[str, ...], tolerance: float, note: Callable[[str], None] | None = None) -> None:
        self.tolerance = tolerance
        self._note = note
        self._checks = checks
        self._compared = dict.fromkeys(checks, 0)
        self._errors: dict[str, tuple[float, str, float]] = {}
        self._messages: dict[str, list[str]] = {name: [] for name in checks}
        self._closed: dict[str, str] = {}
        self._current = checks[0]
        self._prefix = ""

    @contextmanager
    def check(self, name: str) -> Iterator[None]:
        """Say which check an exception inside belongs to."""
        before, self._current = self._current, name
        self._tell(name)
        try:
            yield
        except Exception as error:
            if not getattr(error, "_written_down", False):
                self.failed(_said(error), name)
                error._written_down = True  # type: ignore[attr-defined]  # passes through the checks around this one
            raise
        finally:
            self._current = before

    @contextmanager
    def place(self, prefix: str) -> Iterator[None]:
        """Put ``prefix`` before every place inside."""
        before, self._prefix = self._prefix, f"{self._prefix}{prefix}: "
        try:
            yield
        finally:
            self._prefix = before

    def doing(self, text: str) -> None:
        """Tell what is done that takes long and compares nothing."""
        if self._note is not None:
            self._note(f"{self._current}: {text}")

    def error(self, where: str, error: float, check: str | None = None, *, tolerance: float | None = None) -> None:
        """Write down one relative difference."""
        tolerance = self.tolerance if tolerance is None else tolerance
        check = check or self._current
        where = self._prefix + where
        self._compared[check] += 1
        self._tell(check)
        known, _, _ = self._errors.get(check, (-1.0, "", 0.0))
        if not error <= known and known == known:  # NaN is the worst, and stays
            self._errors[check] = (error, where, tolerance)
        if not error <= tolerance:
            self._messages[check].append(f"{where}: relative difference {error:.3g} is above {tolerance:.3g}")

    def errors(self, errors: Mapping[str, float], check: str | None = None) -> None:
        """Write down relative differences by their place."""
        for where, error in errors.items():
            self.error(where, error, check)

    def close(self, where: str, wanted: Tensor, got: Tensor, check: str | None = None) -> None:
        """Compare two tensors relative to the largest wanted value."""
        if self.true(
            not isinstance(got, DTensor) and wanted.shape == got.shape,
            f"{where}: wanted a plain tensor of shape {tuple(wanted.shape)}, got a {type(got).__name__} of shape "
            f"{tuple(got.shape)}",
            check,
        ):
            self.error(where, difference(wanted, got), check)

    def true(self, condition: bool, message: str, check: str | None = None) -> bool:
        """Write down ``message`` as a failure unless ``condition`` holds; return the condition."""
        check = check or self._current
        self._compared[check] += 1
        if not condition:
            self.failed(message, check)
        return condition

    def failed(self, message: str, check: str | None = None) -> None:
        """Write down a failure."""
        self._messages[check or self._current].append(self._prefix + message)

    def closed(self, reason: str, check: str | None = None) -> None:
        """Write down that a capability is closed."""
        self._closed[check or self._current] = reason

    def absorb(
        self, name: str, checks: tuple[str, ...], run: Callable[[Ledger], None], *, tolerance: float | None = None
    ) -> None:
        """Run checks that have other names, and write what they find down as the current one."""
        own = Ledger(checks, self.tolerance if tolerance is None else tolerance)
        with self.place(name) if name else nullcontext():
            try:
                run(own)
            finally:
                for finding in own.findings():
                    if finding.state == "failed":
                        self.failed(f"{finding.check}: {finding.message}")
                    elif finding.error is not None:
                        self.error(f"{finding.check} {finding.where}", finding.error, tolerance=own.tolerance)
                    elif finding.state == "passed":
                        self._compared[self._current] += finding.compared

    def _tell(self, check: str) -> None:
        if self._note is not None:
            self._note(f"{check}, {sum(self._compared.values())} compared")

    def findings(self) -> list[Finding]:
        """Return one finding for each check."""
        return [self._finding(check) for check in self._checks]

    def _finding(self, check: str) -> Finding:
        messages = self._messages[check]
        error, where, allowed = self._errors.get(check, (None, "", None))
        compared = self._compared[check]
        if messages:
            more = [f"... and {len(messages) - _SHOWN} more"] if len(messages) > _SHOWN else []
            text = "\n".join([*messages[:_SHOWN], *more])
            return Finding(
                check=check, state="failed", compared=compared, error=error, where=where, message=text, allowed=allowed
            )
        if check in self._closed:
            return Finding(check=check, state="closed", message=self._closed[check])
        if not compared:
            return Finding(check=check, state="failed", message="not reached: nothing was compared")
        return Finding(check=check, state="passed", compared=compared, error=error, where=where, allowed=allowed)


def difference(wanted: Tensor, got: Tensor) -> float:
    """Return the largest difference relative to the largest wanted value; NaN and infinities agree with themselves."""
    wanted, got = (t.detach().to(torch.float64) for t in (wanted, got))
    finite = wanted.isfinite() & got.isfinite()
    if not torch.allclose(wanted[~finite], got[~finite], equal_nan=True):
        return float("inf")
    wanted, got = wanted[finite], got[finite]
    if not wanted.numel():
        return 0.0
    return float((wanted - got).abs().max()) / (float(wanted.abs().max()) or 1.0)


def worst(of_ranks: list[list[Finding]]) -> list[Finding]:
    """Return, for each check, the worst finding of all ranks."""
    ranked = {"failed": 2, "passed": 1, "closed": 0}

    def key(finding: Finding) -> tuple[int, float]:
        error = finding.error if finding.error is not None else -1.0
        return ranked[finding.state], float("inf") if error != error else error

    return [max(same, key=key) for same in zip(*of_ranks, strict=True)]


def _said(error: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "shardcore/testing" not in frame.filename]
    place = f" (at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"
