"""The conformance kit: a pack author subclasses `PolicyConformance`, and inherits every test.

    class TestLlama(PolicyConformance):
        plugin = "shard_llama.plugin"

Gradients are compared for every case of the pack, and at every tensor-parallel size for each kind of class; what
depends on the mechanism is tested for each family and each signature of plans. Nothing is taken on the word of a loss,
or of ranks that agree: outputs, losses and the gradient of every parameter are compared with the unsharded model, by
that model's list of names.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import pytest

from shardcore_testing import checks_pack
from shardcore_testing.cases import Case
from shardcore_testing.checks import CHECKS, SECTIONS, Section, examine
from shardcore_testing.checks_training import STEPS
from shardcore_testing.families import Chosen, News
from shardcore_testing.findings import Finding
from shardcore_testing.pool import WorkerError, WorkerPool, WorkerTimeout
from shardcore_testing.subject import Subject, cases_of, registry_of

_PLANS_LIMIT = 300.0  # seconds for all plans of a pack, which may import its libraries first

Judge = Callable[[str], None]


class Examination:
    """Runs sections of one subject, each once, and hands out their findings.

    Args:
        pool: the ranks.
        subject: the case at one size.
        timeout: limit of one section, in seconds.
    """

    def __init__(self, pool: WorkerPool, subject: Subject, timeout: float = 120.0) -> None:
        self._pool, self._subject, self._timeout = pool, subject, timeout
        self._findings: dict[str, list[Finding]] = {}

    def finding(self, check: str) -> Finding:
        """Return the finding of a check; its section runs if it has not yet."""
        section = CHECKS[check]
        if section not in self._findings:
            self._findings[section] = examine(self._pool, self._subject, section, timeout=self._timeout)
        return next(finding for finding in self._findings[section] if finding.check == check)

    def __call__(self, check: str) -> None:
        """Fail, or skip a closed capability, as the finding says."""
        report(self.finding(check), str(self._subject))


def report(finding: Finding, subject: str) -> None:
    """Turn a finding into the outcome of a test."""
    if finding.state == "failed":
        largest = (
            "" if finding.error is None else f"largest relative difference {finding.error:.3g} at {finding.where}\n"
        )
        pytest.fail(f"{finding.check}, {subject}: {largest}{finding.explained()}", pytrace=False)
    if finding.state == "closed":
        pytest.skip(f"closed for {subject}: {finding.message}")


def discoveries(plugins: Sequence[str]) -> dict[str, Finding]:
    """Return what one fresh process says about each of the plugins, which need not be installed.

    Args:
        plugins: their modules; ``""`` for what is installed.
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    command = [sys.executable, "-m", "shardcore_testing._alone", *plugins]
    done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        return dict.fromkeys(plugins, _finding("discovery", [done.stderr[-2000:]]))
    said = json.loads(done.stdout.splitlines()[-1])
    return {plugin: _finding("discovery", said[plugin]) for plugin in plugins}


def plan_findings(
    pool: WorkerPool, plugin: str, cases: Sequence[Case], *, ranks: int, quick: bool = False
) -> list[Finding]:
    """Return what processes of different hash seeds say about the policies and the plans of a pack.

    Args:
        pool: the ranks, each of which has a hash seed of its own.
        plugin: the module of its plugin, which need not be installed; ``""`` for what is installed.
        cases: its cases.
        ranks: how many of them are asked.
        quick: each case at one size alone.
    """
    try:
        answers = pool.run(checks_pack.plans, plugin, list(cases), quick=quick, world=ranks, timeout=_PLANS_LIMIT)
    except (WorkerError, WorkerTimeout) as error:
        return [_finding(check, [str(error)]) for check in ("policies", "digest")]
    policies, digests, _ = answers[0]
    moved = [name for name in digests if len({of_rank[name] for _, of_rank, _ in answers}) > 1]
    order = [
        f"the plan of {name} depends on the hash seed: the order of a set decides something (H28)" for name in moved
    ]
    if len({hashes for *_, hashes in answers}) < len(answers):
        order.append("the ranks share a hash seed, so that their plans say nothing about another one")
    return [_finding("policies", policies), _finding("digest", order, compared=len(digests))]


def _finding(check: str, problems: list[str], compared: int = 1) -> Finding:
    state: Any = "failed" if problems else "passed"
    return Finding(check=check, state=state, compared=compared, message="\n".join(problems))


class PolicyConformance:
    """Inherit from it and set `plugin`, or `cases`, or both; name the subclass so that pytest collects it.

    A test that a case closes is skipped with the reason. ``pytest --quick`` compares the gradients of each family and
    each kind of head on two ranks, and leaves the rest to the first case of the session that shows it; see
    `shardcore_testing.families`.

    Attributes:
        plugin: the module of the pack's plugin; the pack need not be installed.
        cases: the tiny models; by default those that the plugin's ``shardcore_conformance_cases`` names.
        timeout: limit of one section of checks, in seconds.
    """

    plugin: ClassVar[str] = ""
    cases: ClassVar[Sequence[Case]] = ()
    timeout: ClassVar[float] = 120.0
    # Where a session keeps what is new about which case.
    _chosen: ClassVar[pytest.StashKey[Chosen]] = pytest.StashKey()

    @classmethod
    def all_cases(cls) -> Sequence[Case]:
        """Return the cases that are tested."""
        if cls.cases or not cls.plugin:
            return cls.cases
        return cases_of(registry_of(cls.plugin).packs[0].cases)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give each test its cases and sizes."""
        if "judge" not in metafunc.fixturenames:
            return
        # By name, so that a subclass can override a test.
        check = next((c for c in CHECKS if metafunc.function.__name__ == _name(c)), None)
        section = SECTIONS[CHECKS[check]] if check else SECTIONS["plan"]
        steps = self._steps(metafunc.config)
        found = {
            f"{case.name}-tp{tp}": Subject(case=case, tp=tp, plugin=self.plugin, steps=steps(case))
            for case, sizes in self._sizes(section, metafunc.config)
            for tp in sizes
            if tp * section.replicas <= metafunc.config.getoption("ranks") and (check not in STEPS or steps(case))
        }
        judged = [(subject, self.timeout, subject.tp * section.replicas) for subject in found.values()]
        metafunc.parametrize("judge", judged, ids=list(found), indirect=True)

    def _steps(self, config: pytest.Config) -> Callable[[Case], int]:
        """Return what tells how many steps are compared: two of what is new, or one; one or none with ``--quick``."""
        news, quick = self._news(config), config.getoption("quick")
        if quick:
            return lambda case: int(any(of.signature for of in news[case.name].values()))
        return lambda case: 1 + any(of.family or of.signature for of in news[case.name].values())

    def _news(self, config: pytest.Config) -> Mapping[str, Mapping[int, News]]:
        chosen = config.stash.setdefault(self._chosen, Chosen(quick=config.getoption("quick")))
        return chosen.of(type(self), self.all_cases(), self.plugin)

    def _sizes(self, section: Section, config: pytest.Config) -> Iterator[tuple[Case, list[int]]]:
        """Yield each case with the sizes at which a section runs for it."""
        news = self._news(config)
        for case in self.all_cases():
            yield case, section.sizes(case, news[case.name], quick=config.getoption("quick"))

    def test_discovery_imports_no_torch(self, fresh: dict[str, Finding]) -> None:
        """The plugin loads, and imports neither torch nor a model library."""
        report(fresh["discovery"], self.plugin)

    def test_every_policy_has_a_case(self, fresh: dict[str, Finding]) -> None:
        """Every class that the plugin serves exists, and a case covers it."""
        report(fresh["policies"], self.plugin)

    def test_plans_do_not_depend_on_hash_seeds(self, fresh: dict[str, Finding]) -> None:
        """The digest of every plan is equal in processes with different hash seeds."""
        report(fresh["digest"], self.plugin)


def _name(check: str) -> str:
    return f"test_{check.replace(' ', '_')}"


def _test(check: str) -> Callable[[PolicyConformance, Judge], None]:
    def test(self: PolicyConformance, judge: Judge) -> None:
        judge(check)

    test.__name__ = _name(check)
    test.__qualname__ = f"PolicyConformance.{test.__name__}"
    test.__doc__ = SECTIONS[CHECKS[check]].run.__doc__
    return test


# One test for each check, so that a subclass can override or mark a single one.
for _check in CHECKS:
    setattr(PolicyConformance, _name(_check), _test(_check))
