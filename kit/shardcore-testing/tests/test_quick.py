"""``pytest --quick``: what it leaves to the nightly run, and that it says so."""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys

import pytest

from shardcore_testing.checks import SECTIONS
from shardcore_testing.checks_training import STEPS
from shardcore_testing.conformance import PolicyConformance

TESTS = """
import pytest

def nothing():
    pass

@pytest.mark.nightly
def test_slow():
    pass

@pytest.mark.four
def test_chosen(pool):
    pool.run(nothing, world=3)

def test_of_three_ranks(pool):
    pool.run(nothing, world=3)
    raise AssertionError("three ranks were to be had")

def test_plain():
    pass
"""


def _pytest(folder, *options, tests=TESTS):
    (folder / "test_it.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-p", "shardcore_testing.plugin", "-p", "no:cacheprovider", "-rs"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    return subprocess.run([*command, *options], cwd=folder, env=env, capture_output=True, text=True, check=False).stdout


@pytest.mark.nightly
@pytest.mark.parametrize(("option", "passed"), [("--quick", 2), ("--ranks=2", 3)])
def test_long_tests_and_more_than_two_ranks_are_left_out_and_counted(tmp_path, option, passed):
    said = _pytest(tmp_path, option, "--strict-markers")
    assert f"{passed} passed, 1 skipped" in said, said
    assert ("1 deselected" in said) == (option == "--quick")
    assert "3 ranks are left to the nightly run" in said


def test_the_whole_kit_has_them(tmp_path):
    assert "1 passed, 3 deselected" in _pytest(tmp_path, "--strict-markers", "-k", "slow")


class _Metafunc:
    """What pytest tells about one test of `PolicyConformance`."""

    fixturenames = ("judge",)
    most = 4

    def __init__(self, check, given, stash):
        self.config = self
        self.given = given
        self.stash = stash
        self.function = getattr(PolicyConformance, f"test_{check}")

    def getoption(self, name):
        assert name in ("quick", "ranks")
        return self.most if name == "ranks" else name in self.given

    def parametrize(self, name, values, ids, indirect):
        self.ids = ids
        self.ranks = [ranks for _, _, ranks in values]


def _asked(kit, check, *given, stash=None):
    """Return what a kit asks for one check with some options, in a session of its own or in one that is given."""
    asked = _Metafunc(check.replace(" ", "_"), given, pytest.Stash() if stash is None else stash)
    kit().pytest_generate_tests(asked)
    return asked


@pytest.mark.parametrize(("given", "most"), [((), 4), ((), 2), (("quick",), 4)])
def test_no_section_takes_more_ranks_than_there_are(monkeypatch, given, most):
    from kit_net import CASE

    monkeypatch.setattr(_Metafunc, "most", most)
    kit = type("Kit", (PolicyConformance,), {"cases": (CASE,)})
    ranks = set()
    for section in SECTIONS.values():
        asked = _asked(kit, section.checks[0], *given)
        ranks |= set(asked.ranks)
        assert asked.ranks == [int(name[-1]) * section.replicas for name in asked.ids]
    assert ranks == ({1, 2} if given == ("quick",) or most == 2 else {1, 2, 4})


def test_quick_asks_for_numbers_of_each_class_and_for_the_rest_where_it_is_new():
    from kit_net import CASE, build

    def kit(*cases):
        return type("Kit", (PolicyConformance,), {"cases": cases})

    def case(name, **fields):
        return dataclasses.replace(CASE, name=name, **fields)

    def of(kit, check):
        return _asked(kit, check, "quick", stash=stash).ids

    stash = pytest.Stash()
    first = kit(case("net"), case("again"), case("shared", build=functools.partial(build, kv_heads=1)))
    # The plan of the last one has kinds that are not together before, and a layout that is nowhere before.
    for check in ("gradients", "loading", "dropout", "resume"):
        assert [name for name in of(first, check) if name.endswith("tp2")] == ["net-tp2", "shared-tp2"]
    assert of(first, "data parallel") == ["net-tp1", "shared-tp1"]
    # Of another family whose plan is known, the gradients and no steps.
    family = kit(case("family", build=_of_another_class))
    assert of(family, "gradients") == ["family-tp2"]
    for check in STEPS:
        assert not of(family, check)
        assert of(first, check) == of(first, "gradients")
    # Another pack of the session, whose plans hold nothing new, and one that cannot be built.
    second = kit(case("same"), case("broken", build=functools.partial(_of_family, broken=True)))
    for section in SECTIONS.values():
        assert {name.partition("-")[0] for name in of(second, section.checks[0])} <= {"broken"}
    assert of(second, "gradients") == ["broken-tp1", "broken-tp2"]
    assert of(second, "dropout") == ["broken-tp2"]


class _Config:
    pass


def _of_another_class():
    from kit_net import build

    model = build()
    model.__class__ = type("Other", (type(model),), {})
    return model


def _of_family(*, broken=False):
    from kit_net import build

    model = build()
    model.config = _Config()
    if broken:
        raise ValueError("no such model")
    return model


def test_the_whole_kit_asks_for_numbers_of_each_case_and_for_the_rest_where_it_is_new():
    from kit_net import CASE, build

    def case(name, build=build, **supports):
        fields = {"name": name, "build": build, "supports": dataclasses.replace(CASE.supports, **supports)}
        return dataclasses.replace(CASE, **fields)

    def of(check):
        return _asked(kit, check, stash=stash).ids

    stash = pytest.Stash()
    shared = functools.partial(build, kv_heads=2)  # two of four ranks share a head
    cases = (
        case("net"),
        case("again"),
        case("head", _of_another_class),
        case("shared", shared),
        case("more", context=True),
    )
    kit = type("Kit", (PolicyConformance,), {"cases": cases})
    everywhere = ["net-tp1", "net-tp2", "net-tp4"]
    assert of("gradients") == [*everywhere, "again-tp2", "head-tp2", "head-tp4", "shared-tp2", "shared-tp4", "more-tp2"]
    assert of("accumulation") == of("optimizer") == of("gradients")
    assert of("dropout") == of("sequence modes") == ["net-tp2", "shared-tp4", "more-tp2"]
    assert of("resume") == of("inside") == ["net-tp2", "shared-tp4"]
    assert of("data parallel") == ["net-tp1", "net-tp2", "shared-tp1"]
    assert of("context") == ["more-tp1"]
    assert of("experts") == []
    # Another pack begins anew.
    kit = type("Kit", (PolicyConformance,), {"cases": (case("other"),)})
    assert of("dropout") == ["other-tp2"]


KIT = """
from kit_net import CASE
from shardcore_testing import PolicyConformance

class TestNet(PolicyConformance):
    cases = (CASE,)

def test_between():
    pass
"""


@pytest.mark.nightly
def test_tests_of_one_number_of_ranks_follow_each_other(tmp_path):
    said = _pytest(tmp_path, "--collect-only", "-q", "-k", "gradients or forward or between", tests=KIT)
    collected = [line.partition("::")[2] for line in said.splitlines() if "::" in line]
    sizes = [int(name[-2]) for name in collected if "tp" in name]
    assert sizes == [1, 1, 2, 2, 4, 4], said
    assert collected[-1] == "test_between"
