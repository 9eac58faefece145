"""What nox tests against what, and what it keeps of the outcome; needs no nox."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from cells import cells_of, find_packs, floors_of, lowest, newest_of  # noqa: E402  # from tools/
from environments import Environment  # noqa: E402
from results import Result, Results, digest_of, total  # noqa: E402

PACK = """
[project]
name = "{name}"
dependencies = ["shardcore>=0.1", "transformers>=4.57.6,<6", "torch>=2.11", {needs}]
[tool.shardcore.matrix]
{matrix}
"""

REPORT = """
<testsuites><testsuite>
<testcase classname="a" name="passes" time="1.25"/>
<testcase classname="a" name="fails"><failure message="x"/></testcase>
<testcase classname="a" name="fails"><error message="in its teardown"/></testcase>
<testcase classname="a" name="cannot"><skipped message="closed: dropout"/></testcase>
</testsuite></testsuites>
"""


@pytest.fixture
def packs(tmp_path):
    written = {
        "shard-a": 'transformers = ["5.10.4", "4.57.6", "5.5.4"]',
        "shard-b": 'transformers = ["5.5.4", "4.57.6"]\ntimm = ["1.0.23"]\n[tool.shardcore]\nwhole = true',
    }
    for name, matrix in written.items():
        folder = tmp_path / "packs" / name
        folder.mkdir(parents=True)
        (folder / "pyproject.toml").write_text(
            PACK.format(name=name, matrix=matrix, needs='"shard-a"' if name == "shard-b" else "")
        )
    return find_packs(tmp_path)


def test_each_pack_is_tested_whole_and_the_other_releases_with_all_packs_that_name_them(packs):
    a, b = packs
    cells = {cell.name: cell for cell in cells_of(packs, "torch==2.13.0")}
    leave = ("-m", "not newest")
    assert {name: (cell.packs, cell.whole, cell.options) for name, cell in cells.items()} == {
        "shard-a-transformers-5.10.4": ((a,), True, ()),
        "shard-b-transformers-5.5.4": ((b,), True, ()),
        "shard-b-timm-1.0.23": ((b,), True, ("-k", "timm or every_policy")),
        "shard-b-transformers-4.57.6": ((b,), True, leave),
        "transformers-5.5.4": ((a,), False, leave),
        "transformers-4.57.6": ((a,), False, leave),
    }
    assert list(cells)[-3:] == ["shard-b-transformers-4.57.6", "transformers-5.5.4", "transformers-4.57.6"]
    covered = [(pack, cell.library, cell.release) for cell in cells.values() for pack in cell.packs]
    named = [(pack, library, release) for pack in packs for library, all_ in pack.matrix.items() for release in all_]
    assert len(covered) == len(named)
    assert set(covered) == set(named)


def test_packs_that_a_pack_derives_from(packs):
    a, b = packs
    assert (a.needed(packs), b.needed(packs)) == ([], [a])


def test_packs_that_the_tests_of_a_pack_need(packs):
    a, b = packs
    for pack in (a, b):
        metadata = pack.folder / "pyproject.toml"
        text = metadata.read_text().replace(', "shard-a"]', "]")
        metadata.write_text(f'{text}\n[project.optional-dependencies]\ntesting = ["pytest"]\n')
    metadata = a.folder / "pyproject.toml"
    metadata.write_text(metadata.read_text().replace('"pytest"', '"pytest", "shard-b>=0.1"'))
    a, b = find_packs(a.folder.parents[1])
    assert (a.needed([a, b]), b.needed([a, b])) == ([b], [])


def test_packs_share_the_environment_of_a_release(packs):
    by_name = {}
    for cell in cells_of(packs, "torch==2.13.0"):
        assert by_name.setdefault(cell.environment.name, cell.environment) == cell.environment
    assert set(by_name) == {"transformers-4.57.6", "transformers-5.5.4", "transformers-5.10.4", "timm-1.0.23"}
    assert by_name["transformers-5.5.4"].torch == ("torch==2.13.0",)
    assert by_name["transformers-5.5.4"].pins == ("transformers==5.5.4",)
    # A library that needs a torch of its own brings it, and the newest of what else the pack needs.
    assert "torch==2.13.0" not in by_name["timm-1.0.23"].torch
    assert by_name["timm-1.0.23"].pins == ("timm==1.0.23", "transformers==5.5.4")


def test_releases_of_torch_itself(tmp_path):
    folder = tmp_path / "packs" / "shard-c"
    folder.mkdir(parents=True)
    folder.joinpath("pyproject.toml").write_text(
        PACK.format(name="shard-c", matrix='torch = ["2.14.1", "2.13.0"]', needs="")
    )
    packs = find_packs(tmp_path)
    found = [cell.environment for cell in cells_of(packs, "torch==2.13.0")]
    assert [(e.name, e.torch, e.pins) for e in found] == [
        ("torch-2.14.1", ("torch==2.14.1", "torchvision==0.29.1"), ()),  # as installed for timm
        ("torch-2.13.0", ("torch==2.13.0",), ()),
    ]
    assert newest_of(packs) == {}  # every environment has one already


def test_packs_for_pins(packs):
    def fit(*pins):
        return [pack.name for pack in packs if pack.is_tested_with(pins)]

    assert fit("transformers==4.57.6", "peft==0.18.0") == ["shard-a", "shard-b"]
    assert fit("transformers==5.10.4") == ["shard-a"]
    assert fit("transformers==5.5.4", "timm==1.0.31") == ["shard-a"]
    assert fit("peft==0.18.0") == ["shard-a", "shard-b"]


def test_limits(packs):
    assert newest_of(packs) == {"transformers": "5.10.4"}
    assert lowest(packs[0].dependencies, "torch") == "torch==2.11"
    floors = floors_of([*packs[0].dependencies, "torch>=2.12"], ["transformers"])
    assert floors == Environment("lowest-torch-2.12-transformers-4.57.6", ("torch==2.12",), ("transformers==4.57.6",))
    with pytest.raises(ValueError, match="no lower limit of timm"):
        lowest(packs[0].dependencies, "timm")


def test_what_a_pack_allows_is_allowed_by_the_packs_that_it_needs():
    core = tomllib.loads((ROOT / "shardcore" / "pyproject.toml").read_text())["project"]["dependencies"]
    packs = {pack.name: pack for pack in find_packs(ROOT)}

    def floor(pack, library):
        return Version(lowest([*core, *pack.dependencies], library).partition("==")[2])

    for pack in packs.values():
        for needed in {Requirement(said).name for said in pack.dependencies} & packs.keys():
            for library in ("torch", "transformers"):
                assert floor(pack, library) >= floor(packs[needed], library), (pack.name, needed, library)


def test_the_packs_of_this_workspace_say_what_they_are_tested_against():
    names = {pack.name for pack in find_packs(ROOT)}
    assert names >= {"shard-bert", "shard-gpt2", "shard-llama", "shard-mistral", "shard-vit", "shard-whisper"}
    cells = [cell.name for cell in cells_of(find_packs(ROOT), "torch")]
    assert len(set(cells)) == len(cells)


def test_counts_of_a_report(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    result = Result.of(report, success=False, seconds=61, name="n", suite="s", against="transformers 5.0.0")
    assert str(result) == "1 passed, 1 failed, 1 skipped"
    assert result.skipped == {"closed: dropout": 1}
    assert result.failures == {"a::fails": "x"}
    results = Results(tmp_path / "results")
    results.write(result)
    assert results.slowest(1) == "    1.2 s  n  a::passes"


DIES = """
import os
import pytest

@pytest.fixture
def broken():
    yield
    raise ZeroDivisionError

def test_one(): pass
def test_two(): assert False
def test_three(): pytest.skip("closed: dropout")
def test_four(broken): pass
def test_five(): os._exit(1)
def test_six(): pass
"""


def test_a_run_that_died_keeps_what_had_passed(tmp_path):
    (tmp_path / "test_dies.py").write_text(DIES)
    lines, report = tmp_path / "lines.jsonl", tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", "-p", "outcomes", f"--outcomes={lines}"]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tools")}
    done = subprocess.run(
        [*command, str(tmp_path)], cwd=tmp_path, env=env, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert not report.exists()
    result = Result.of(report, success=False, seconds=1, lines=lines, name="n", suite="s")
    assert str(result) == "1 passed, 3 failed, 1 skipped"
    assert result.skipped == {"closed: dropout": 1}
    assert {test.partition("::")[2]: why for test, why in result.failures.items()} == {
        "test_two": "assert False",
        "test_four": "ZeroDivisionError",
        "test_five": "the process died while it ran",
    }


def test_a_run_without_a_report_is_a_failure(tmp_path):
    result = Result.of(tmp_path / "none.xml", success=False, seconds=0, name="n", suite="s")
    assert (result.failed, list(result.failures)) == (1, ["the run itself"])


PARTS = """
<testsuites><testsuite>
<testcase classname="packs.shard-a.tests.test_c.TestA" name="passes" time="1.25"/>
<testcase classname="packs.shard-a-more.tests.test_c.TestB" name="fails" time="2"><failure message="x"/></testcase>
<testcase classname="" name="packs.shard-c.tests.test_c"><error message="collection failure"/></testcase>
</testsuite></testsuites>
"""


def _parts(report, lines=None):
    names = ("shard-a", "shard-a-more", "shard-c", "shard-d")
    below = [Path("packs", name, "tests") for name in names]
    return [
        Result.of(report, success=False, seconds=9, lines=lines, below=folder, name="n", suite="s") for folder in below
    ]


def test_each_pack_of_a_run_has_a_result_of_its_own(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(PARTS)
    a, more, c, d = _parts(report)
    assert (str(a), a.seconds, list(a.slowest)) == (
        "1 passed, 0 failed", 1.2, ["packs.shard-a.tests.test_c.TestA::passes"],
    )  # fmt: skip
    assert (more.failures, more.seconds) == ({"packs.shard-a-more.tests.test_c.TestB::fails": "x"}, 2)
    assert c.failures == {"::packs.shard-c.tests.test_c": "collection failure"}
    assert str(d) == "0 passed, 0 failed"
    assert str(total([a, more, c])) == "1 passed, 2 failed"


def test_no_pack_of_a_run_that_died_has_passed(tmp_path):
    lines = tmp_path / "lines.jsonl"
    test = "packs/shard-a/tests/test_c.py::TestA::test_one"
    lines.write_text(
        "".join(json.dumps({"test": test, "outcome": o, "reason": ""}) + "\n" for o in ("started", "passed"))
    )
    a, *others = _parts(tmp_path / "none.xml", lines)
    assert (str(a), {result.failed for result in others}) == ("1 passed, 1 failed", {1})
    report = tmp_path / "nothing.xml"
    report.write_text("<testsuites><testsuite></testsuite></testsuites>")
    assert {result.failed for result in _parts(report)} == {1}


def test_what_failed_is_named_last(tmp_path):
    results = Results(tmp_path)
    failures = {"tests.test_a::test_one": "AssertionError: 1e-3"}
    results.write(Result(name="core", suite="shardcore", failed=1, failures=failures, skipped={"closed": 1}))
    assert results.table().splitlines()[-2:] == [
        "- shardcore, 1 skipped: closed",
        "- core FAILED tests.test_a::test_one: AssertionError: 1e-3",
    ]


def test_results_are_kept_and_a_run_is_resumed(tmp_path):
    results = Results(tmp_path / "results")
    assert str(results.totals()) == "0 passed, 0 failed"
    for name, failed in (("one", 0), ("two", 1)):
        results.write(Result(name=name, suite=f"shard-{name}", against="transformers 5.0.0", passed=2, failed=failed,
                             skipped={"closed": 1}, seconds=61, sources="abc"))  # fmt: skip
    again = Results(tmp_path / "results")
    assert again.passed_before("one", "abc")
    assert not again.passed_before("one", "other sources")
    assert not again.passed_before("two", "abc")
    assert (tmp_path / "results" / "totals").read_text() == "4 passed, 1 failed, 2 skipped\n"
    table = (tmp_path / "results" / "table.md").read_text().splitlines()
    assert table[0] == "|  | transformers 5.0.0 |"
    assert table[2] == "| shard-one | 2 passed, 0 failed, 1 skipped (1:01) |"
    assert "- shard-two, 1 skipped: closed" in table


def test_reasons_of_the_kit_are_counted_together(tmp_path):
    results = Results(tmp_path)
    skipped = {"closed for model at tp 2: generation": 2, "closed for masked_lm at tp 4: generation": 1, "no timm": 1}
    results.write(Result(name="one", suite="shard-one", skipped=skipped))
    assert results.table().splitlines()[-2:] == [
        "- shard-one, 3 skipped: closed by a case: generation",
        "- shard-one, 1 skipped: no timm",
    ]


def test_releases_are_in_their_order(tmp_path):
    results = Results(tmp_path)
    for release in ("5.10.4", "5.5.4"):
        results.write(Result(name=release, suite="s", against=f"transformers {release}"))
    results.write(Result(name="core", suite="shardcore"))
    assert results.table().splitlines()[0] == "|  | alone | transformers 5.5.4 | transformers 5.10.4 |"


def test_the_digest_is_of_what_is_tested(tmp_path):
    source = tmp_path / ".nox" / "source"  # where the sources themselves lie does not matter
    source.mkdir(parents=True)
    (source / "a.py").write_text("1")
    first = digest_of([source])
    (source / "__pycache__").mkdir()
    (source / "__pycache__" / "a.pyc").write_text("compiled")
    assert digest_of([source]) == first
    (source / "a.py").write_text("2")
    assert digest_of([source]) != first
