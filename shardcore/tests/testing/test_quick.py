"""``pytest --quick``: what it leaves to the whole kit, and that it says so."""

from __future__ import annotations

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


def _pytest(folder, *options):
    (folder / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "shardcore.testing.plugin", "-p", "no:cacheprovider", "-rs"]
    return subprocess.run([*command, *options], cwd=folder, capture_output=True, text=True, check=False).stdout


def test_long_tests_and_more_than_two_ranks_are_left_out_and_counted(tmp_path):
    said = _pytest(tmp_path, "--quick", "--strict-markers")
    assert "2 passed, 1 skipped, 1 deselected" in said, said
    assert "--quick leaves 3 ranks to the whole kit" in said


def test_the_whole_kit_has_them(tmp_path):
    assert "1 passed, 3 deselected" in _pytest(tmp_path, "--strict-markers", "-k", "slow")


class _Metafunc:
    """What pytest tells about one test of `PolicyConformance`."""

    fixturenames = ("judge",)

    def __init__(self, check, quick):
        self.config = self
        self.quick = quick
        self.function = getattr(PolicyConformance, f"test_{check}")

    def getoption(self, name):
        assert name == "quick"
        return self.quick

    def parametrize(self, name, values, ids, indirect):
        self.ids = ids


@pytest.mark.parametrize("quick", [True, False])
def test_no_section_takes_more_than_two_ranks(quick):
    from kit_net import CASE

    kit = type("Kit", (PolicyConformance,), {"cases": (CASE,)})()
    ranks = set()
    for section in SECTIONS.values():
        asked = _Metafunc(section.checks[0].replace(" ", "_"), quick)
        kit.pytest_generate_tests(asked)
        ranks |= {int(name[-1]) * section.replicas for name in asked.ids}
    assert ranks == ({1, 2} if quick else {1, 2, 4})
