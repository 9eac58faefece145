"""``pytest --quick``: what it leaves to the whole kit, and that it says so."""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys

import pytest

from shardcore.testing.checks import SECTIONS
from shardcore.testing.conformance import PolicyConformance

TESTS = """
import pytest

def nothing():
    pass

@pytest.mark.whole
def test_slow():
    pass

def test_of_three_ranks(pool):
    pool.run(nothing, world=3)
    raise AssertionError("three ranks were to be had")

def test_size(pool):
    assert pool.size == 2

def test_plain():
    pass
"""


def _pytest(folder, *options, tests=TESTS):
    (folder / "test_it.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-p", "shardcore.testing.plugin", "-p", "no:cacheprovider", "-rs"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    return subprocess.run([*command, *options], cwd=folder, env=env, capture_output=True, text=True, check=False).stdout


def test_long_tests_and_more_than_two_ranks_are_left_out_and_counted(tmp_path):
    said = _pytest(tmp_path, "--quick", "--strict-markers")
    assert "2 passed, 1 skipped, 1 deselected" in said, said
    assert "--quick leaves 3 ranks to the whole kit" in said


def test_the_whole_kit_has_them(tmp_path):
    assert "1 passed, 3 deselected" in _pytest(tmp_path, "--strict-markers", "-k", "slow")


class _Metafunc:
    """What pytest tells about one test of `PolicyConformance`."""

    fixturenames = ("judge",)

    def __init__(self, check, given):
        self.config = self
        self.given = given
        self.function = getattr(PolicyConformance, f"test_{check}")

    def getoption(self, name):
        assert name in ("quick", "families")
        return name in self.given

    def parametrize(self, name, values, ids, indirect):
        self.ids = ids
        self.ranks = [ranks for _, _, ranks in values]


def _asked(kit, check, *given):
    """Return what a kit asks for one check with some options."""
    asked = _Metafunc(check.replace(" ", "_"), given)
    kit().pytest_generate_tests(asked)
    return asked


@pytest.mark.parametrize("given", [(), ("families",), ("quick",)])
def test_no_section_takes_more_than_two_ranks(given):
    from kit_net import CASE

    kit = type("Kit", (PolicyConformance,), {"cases": (CASE,)})
    ranks = set()
    for section in SECTIONS.values():
        asked = _asked(kit, section.checks[0], *given)
        ranks |= set(asked.ranks)
        assert asked.ranks == [int(name[-1]) * section.replicas for name in asked.ids]
    assert ranks == ({1, 2} if given == ("quick",) else {1, 2, 4})


class _Config:
    pass


def _of_family(*, broken=False):
    from kit_net import build

    model = build()
    model.config = _Config()
    if broken:
        raise ValueError("no such model")
    return model


@pytest.mark.parametrize(
    ("given", "standing"), [("families", ["plain", "first", "broken"]), ("quick", ["plain"])], ids=["families", "quick"]
)
def test_what_a_family_shares_is_left_to_its_first_case(given, standing):
    from kit_net import CASE

    def case(name, **fields):
        return dataclasses.replace(CASE, name=name, **fields)

    cases = (
        case("plain"),
        case("also_plain"),  # without a configuration, of the family of its class
        case("first", build=_of_family),
        case("head", build=_of_family, supports=dataclasses.replace(CASE.supports, experts=True)),
        case("broken", build=functools.partial(_of_family, broken=True)),
    )
    kit = type("Kit", (PolicyConformance,), {"cases": cases})
    for name, section in SECTIONS.items():
        every = ["plain", "head"] if section.claim else ["plain", "also_plain", "first", "head", "broken"]
        (check, *_), several = section.checks, section.several and section.replicas == 1
        found = {tested.partition("-")[0]: tested for tested in _asked(kit, check, given).ids}
        assert list(found) == (standing if section.family else every), name
        assert {tested.partition("-")[0] for tested in _asked(kit, check).ids} == set(every), name
        assert ("head-tp1" in _asked(kit, check, given).ids) == (not several and not section.family), name
        assert ("head-tp1" in _asked(kit, check).ids) == (section.alone or section.replicas > 1), name


KIT = """
from kit_net import CASE
from shardcore.testing import PolicyConformance

class TestNet(PolicyConformance):
    cases = (CASE,)

def test_between():
    pass
"""


def test_tests_of_one_number_of_ranks_follow_each_other(tmp_path):
    said = _pytest(tmp_path, "--collect-only", "-q", "-k", "gradients or accumulation or between", tests=KIT)
    collected = [line.partition("::")[2] for line in said.splitlines() if "::" in line]
    sizes = [int(name[-2]) for name in collected if "tp" in name]
    assert sizes == [1, 1, 2, 2, 4, 4], said
    assert collected[-1] == "test_between"
