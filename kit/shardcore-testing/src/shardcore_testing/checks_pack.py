"""Checks of a pack as a whole: digests of all plans, and a case for every class."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from shardcore.errors import PlanError
from shardcore.hooks import PolicySpec
from shardcore.plugins.versions import is_met
from shardcore_testing.cases import Case
from shardcore_testing.families import quick_size
from shardcore_testing.subject import Subject, cases_of, meta_copy, registry_of


def plans(plugin: str, cases: Sequence[Case], *, quick: bool = False) -> tuple[list[str], dict[str, str], int]:
    """Compile every plan of a pack in this process.

    Args:
        plugin: the module of its plugin, which need not be installed; ``""`` for what is installed.
        cases: its cases; none for those that the plugin names.
        quick: each case at one size alone.

    Returns:
        Problems of the policies, the digest of each case at each size, and what tells the process's hashes of strings
        from those of another hash seed.
    """
    digests: dict[str, str] = {}
    covered: set[str] = set()
    for case in cases or cases_of(registry_of(plugin).packs[0].cases):
        model = case.build()
        covered.add(f"{type(model).__module__}.{type(model).__qualname__}")
        for tp in (quick_size(case),) if quick else case.supports.tensor_parallel:
            try:
                digest = Subject(case=case, tp=tp, plugin=plugin).plan(meta_copy(model)).digest
            except PlanError as error:
                digest = str(error)
            digests[f"{case.name} at tp {tp}"] = digest
    specs = [spec for pack in registry_of(plugin).packs for spec in pack.specs] if plugin else []
    return _uncovered(specs, covered), digests, hash("shardcore")


def _uncovered(specs: Iterable[PolicySpec], covered: set[str]) -> list[str]:
    problems = []
    for spec in specs:
        if not is_met(spec.requires):
            continue
        module, _, name = spec.target.rpartition(".")
        if "*" not in module and not hasattr(importlib.import_module(module), name):
            problems.append(f"{spec.target} does not exist; say for which releases it does with requires=")
        elif not any(fnmatchcase(each, spec.target) for each in covered):
            problems.append(f"no case covers {spec.target}, so nothing shows that {spec.policy} is right")
    return problems
