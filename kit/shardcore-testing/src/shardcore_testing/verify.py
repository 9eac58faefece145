"""``shardcore verify``: the comparisons of the conformance kit, on a model or on the cases of a pack."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from torch import nn

from shardcore.errors import ConfigError
from shardcore.mesh.axes import accelerator
from shardcore.nn.randomness import DropoutSites
from shardcore.plugins.registry import Pack, default_registry
from shardcore_cli.tables import say, show_table
from shardcore_testing.cases import Case, Supports
from shardcore_testing.checks import SECTIONS, examine, sections_for
from shardcore_testing.findings import Finding
from shardcore_testing.pool import WorkerPool
from shardcore_testing.subject import Subject, cases_of
from shardcore_transformers.models import meta_model

#: What is compared on a model as it was given; the cases of a pack go through everything.
_OF_A_MODEL = ("plan", "training", "communication")

#: Copies of all parameters that one rank holds at its highest: weights, gradients, two moments, and the sharded twin.
_COPIES = 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One section of one case at one size, and what it found."""

    subject: Subject
    section: str
    findings: list[Finding] = dataclasses.field(default_factory=list)


def jobs_for(source: str, tp: int) -> list[Job]:
    """Return what there is to do.

    Args:
        source: the name of an installed pack (or of its distribution), or a model: a folder with a config.json, a
            config.json, or a class name.
        tp: tensor-parallel ranks.

    Raises:
        ConfigError: there is no such pack or model, no pack says how to call it, or it does not fit into memory.
        NoPolicyError: no installed pack serves it.
    """
    packs = default_registry().packs
    for pack in packs:
        if source in (pack.name, pack.distribution):
            return _of_pack(pack, tp)
    near = difflib.get_close_matches(source, [name for pack in packs for name in (pack.name, pack.distribution)], n=1)
    if near and not Path(source).exists():
        raise ConfigError(f"no pack {source!r} is installed. Did you mean {near[0]!r}?")
    try:
        subject = Subject(case=_given(source, tp), tp=tp)
    except ConfigError as error:
        if source.islower() and "/" not in source:  # as names of packs are, and of no class
            raise ConfigError(f"{error}; or a pack: {', '.join(pack.name for pack in packs)}") from error
        raise
    return [Job(subject=subject, section=name) for name in _OF_A_MODEL if name in sections_for(tp)]


def _of_pack(pack: Pack, tp: int) -> list[Job]:
    if pack.status != "loaded":
        raise ConfigError(f"pack {pack} is {pack.status}; see: shardcore packs")
    # What is verified is the policy that users get, whatever a case says for its own tests.
    cases = [dataclasses.replace(case, policy=None) for case in cases_of(pack.cases)]
    if not cases:
        raise ConfigError(f"pack {pack} names no cases; its plugin has no shardcore_conformance_cases")
    fitting = [case for case in cases if tp in {1, *case.supports.tensor_parallel}]
    if not fitting:
        raise ConfigError(f"no case of pack {pack} supports --tp {tp}")
    sizes = dict.fromkeys((1, tp))
    subjects = [Subject(case=case, tp=size) for case in fitting for size in sizes]
    return [Job(subject=subject, section=name) for subject in subjects for name in sections_for(subject.tp)]


def _given(source: str, tp: int) -> Case:
    """Return the case of the model's class, with the model itself in the place of the tiny one."""
    model = meta_model(source)
    pack = default_registry().resolve(type(model)).pack
    case = next((case for case in cases_of(pack.cases) if type(case.build()) in type(model).__mro__), None)
    name = type(model).__name__
    if case is None:
        raise ConfigError(
            f"pack {pack} has no conformance case for {name}, so nothing says how to call it; its own cases are "
            f"verified by: shardcore verify {pack.name}"
        )
    _check_memory(source, sum(p.numel() for p in model.parameters()), tp)
    return dataclasses.replace(
        case,
        name=name,
        build=functools.partial(build_given, source),
        options={},
        sharded=(),
        refuses=(),
        supports=Supports(tensor_parallel=(tp,)),
        policy=None,
    )


def build_given(source: str, **options: Any) -> nn.Module:
    """Build a model as its configuration says, with random weights and without dropout."""
    empty: Any = meta_model(source)
    config = getattr(empty, "config", None)
    from_config = config is not None and getattr(type(empty), "config_class", None) is not None
    torch.manual_seed(0)
    model: nn.Module = type(empty)(config) if from_config else type(empty)()
    for module, name in DropoutSites([model]).probabilities:
        setattr(module, name, 0.0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            middle = 1.0 if parameter.ndim < 2 and name.endswith("weight") else 0.0
            scale = parameter.size(-1) ** -0.5 if parameter.ndim > 1 else 0.1
            parameter.copy_(middle + scale * noise)
    return model


def _check_memory(source: str, parameters: int, tp: int) -> None:
    """Refuse a model of which this machine cannot hold the copies that a comparison needs."""
    needed, free = parameters * 8 * _COPIES * tp, _free_memory()
    if free is not None and needed > free:
        raise ConfigError(
            f"{source} has {parameters:,} parameters: comparing it in float64 on {tp} ranks needs about "
            f"{needed / 2**30:.0f} GiB, and {free / 2**30:.0f} GiB are free. Give a config.json with fewer layers "
            "(num_hidden_layers=2) and a smaller width; what is sharded how does not change"
        )


def _free_memory() -> int | None:
    """Return the free memory in bytes; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None)


def check_device(device: str) -> None:
    """Refuse a device that ranks cannot have here.

    Raises:
        ConfigError: it is neither the CPU nor this machine's accelerator.
    """
    if device not in ("cpu", accelerator()):
        raise ConfigError(
            f"--device {device} is not here; this machine has {' and '.join(filter(None, ('cpu', accelerator())))}, as "
            "torch finds it. What torch finds is told by: shardcore doctor"
        )


def verify(
    jobs: list[Job],
    tp: int,
    *,
    device: str = "cpu",
    timeout: float,
    progress: Callable[[Job], None],
    notes: Path | None = None,
) -> list[Job]:
    """Run the jobs and return those that ran; after a plan that fails, nothing else of its case runs.

    Args:
        jobs: what there is to do.
        tp: the largest number of ranks.
        device: the type of their devices.
        timeout: limit of one section, in seconds.
        progress: called before each job.
        notes: a file into which what is done is written: before the ranks run by this process, then by the first one.
    """
    done: list[Job] = []
    planless: set[tuple[str, int]] = set()
    ranks = max((job.subject.tp * SECTIONS[job.section].replicas for job in jobs), default=tp)

    def note(text: str) -> None:
        if notes is not None:
            notes.write_text(text)

    most = max(tp, ranks)
    with WorkerPool(most, device=device, collective_timeout=min(timeout, 120.0), note=note) as pool:
        for job in jobs:
            progress(job)
            key = (job.subject.case.name, job.subject.tp)
            if key in planless:
                continue
            findings = examine(pool, job.subject, job.section, timeout=timeout, notes=notes)
            if job.section == "plan" and findings[0].state != "passed":
                # What the installed torch lacks closes a test of the pack; here it is the answer.
                findings = [dataclasses.replace(findings[0], state="failed")]
                planless.add(key)
            done.append(dataclasses.replace(job, findings=findings))
    return done


def to_json(done: list[Job]) -> dict[str, Any]:
    """Return the findings as JSON data."""
    findings = [
        {"case": job.subject.case.name, "tp": job.subject.tp, **dataclasses.asdict(finding), "hazards": finding.hazards}
        for job in done
        for finding in job.findings
    ]
    for finding in findings:
        if finding["error"] is not None and not math.isfinite(finding["error"]):
            finding["error"] = str(finding["error"])  # JSON has no word for it
    return {"passed": passed(done), "findings": findings}


def passed(done: list[Job]) -> bool:
    """Return whether nothing failed."""
    return not any(finding.state == "failed" for job in done for finding in job.findings)


def show(done: list[Job], seconds: float) -> None:
    """Print what was compared, then what failed, and at the end how it went; ``seconds`` is how long it took."""
    found = [(job, finding) for job in done for finding in job.findings]
    columns = ("case", "tp", "check", "state", "compared", "largest error", "where")
    if sys.stdout.isatty():
        subjects = dict.fromkeys(str(job.subject) for job, _ in found)
        for subject in subjects:
            rows = [_cells(job, finding)[2:] for job, finding in found if str(job.subject) == subject]
            show_table(subject, columns[2:], rows)
    else:
        show_table("verified", columns, [_cells(job, finding) for job, finding in found])
    for job, finding in found:
        if finding.state == "failed":
            click.echo(f"\n{finding.check}, {job.subject}:\n  " + finding.explained().replace("\n", "\n  "))
    click.echo()
    say(summary(done, seconds), "passed" if passed(done) else "failed")


def summary(done: list[Job], seconds: float) -> str:
    """Return what came out in one line: how many checks, of what, the largest error and what was allowed, the time."""
    findings = [finding for job in done for finding in job.findings]
    failed = sum(finding.state == "failed" for finding in findings)
    closed = sum(finding.state == "closed" for finding in findings)
    models = dict.fromkeys(job.subject.case.name for job in done)
    sizes = sorted({job.subject.tp for job in done})
    ranks = f"{' and '.join(map(str, sizes))} rank{'s' * (sizes != [1])}"
    of = next(iter(models)) if len(models) == 1 else f"{len(models)} models"
    count = f"{failed} of {len(findings) - closed}" if failed else str(len(findings) - closed)
    compared = f"{sum(finding.compared for finding in findings)} comparisons"
    parts = [f"{count} checks of {of} on {ranks} with random weights, sharded against unsharded: {compared}"]
    near = [f for f in findings if f.error is not None and f.allowed]
    if near:
        worst = max(near, key=lambda f: math.inf if f.error != f.error else (f.error or 0.0) / (f.allowed or 1.0))
        parts += [f"largest error {worst.error:.1e} (allowed {worst.allowed:.0e})"]
    parts += [f"{closed} not run: the pack says that its model cannot do that"] if closed else []
    return f"{'FAILED' if failed else 'OK'}: {', '.join(parts)}, {seconds:.0f} s"


def _cells(job: Job, finding: Finding) -> tuple[str, ...]:
    error = "" if finding.error is None else f"{finding.error:.1e}"
    where = finding.where or ("see below" if finding.state == "failed" else finding.message)
    return (
        job.subject.case.name,
        str(job.subject.tp),
        finding.check,
        finding.state,
        str(finding.compared),
        error,
        where,
    )
