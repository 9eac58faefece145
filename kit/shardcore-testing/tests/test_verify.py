"""``shardcore verify``, on a pack that is right and on one that is wrong, without any model library."""

from __future__ import annotations

import importlib
import json
import re
import sys
import time

import pytest
from click.testing import CliRunner
from terminals import at_a_terminal, plain

from shardcore.errors import ConfigError
from shardcore.plugins.registry import GROUP, default_registry
from shardcore_cli import main
from shardcore_testing import verify
from shardcore_testing.checks import SECTIONS
from shardcore_testing.watching import Steps, progress_bar

MODELS = """
import dataclasses

import kit_net

class Small(kit_net.Net):
    def __init__(self):
        super().__init__(kit_net.Config(dropout=0.3))

class Huge(kit_net.Net):
    def __init__(self):
        super().__init__(kit_net.Config(hidden=2**16, inner=2**18, layers=4))

def cases():
    return [kit_net.CASE]

def hidden():
    return [dataclasses.replace(kit_net.CASE, loss=lambda outputs: outputs.loss)]
"""

LACKING = """
import kit_net
from shardcore.comm import strided
from shardcore.policy import Word

strided.torch_lacks = lambda: "torch has no such thing yet"

class Policy(kit_net.NetPolicy):
    def module_policy(self):
        refuses = Word(text="later()", planned=lambda scope: scope.refuse(strided.torch_lacks(), "install a newer one"))
        rules = super().module_policy()
        return {**rules, "Net": [*rules["Net"], refuses]}
"""

PLUGIN = """
from shardcore.hooks import PolicySpec, hookimpl

@hookimpl
def shardcore_policies():
    return [PolicySpec(target="kit_net.Net", policy="{policy}")]

@hookimpl
def shardcore_conformance_cases():
    return {cases}
"""


@pytest.fixture
def pack(tmp_path, monkeypatch):
    """Installs the pack ``kit`` with a policy, in a folder on the path of this process and of its workers."""

    def install(policy="kit_net:NetPolicy", cases='["verified_models:cases"]'):
        (tmp_path / "verified_models.py").write_text(MODELS)
        (tmp_path / "shard_kit_plugin.py").write_text(PLUGIN.format(policy=policy, cases=cases))
        info = tmp_path / "shard_kit-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shard-kit\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{GROUP}]\nkit = shard_kit_plugin\n")
        monkeypatch.syspath_prepend(tmp_path)
        importlib.invalidate_caches()
        default_registry.cache_clear()

    yield install
    default_registry.cache_clear()
    for name in ("verified_models", "shard_kit_plugin"):
        sys.modules.pop(name, None)


def run(*arguments):
    return CliRunner().invoke(main, ["verify", *arguments])


@pytest.mark.nightly
def test_a_model_that_is_right(pack):
    pack()
    result = run("verified_models.Small")
    assert result.exit_code == 0, result.output
    head, *lines = result.output.splitlines()
    assert head.split("\t") == ["case", "tp", "check", "state", "compared", "largest error", "where"]
    (line,) = [line.split("\t") for line in lines if "\tgradients\t" in line]
    assert line[:4] == ["Small", "2", "gradients", "passed"]
    assert float(line[5]) < 1e-9
    assert "." in line[6]
    last = result.output.splitlines()[-1]
    assert last.startswith("OK: 10 checks of Small on 2 ranks with random weights, sharded against unsharded: ")
    error, allowed = re.search(r"largest error (\S+) \(allowed (\S+)\), \d+ s$", last).groups()
    assert 0 < float(error) < float(allowed) == 1e-12


@pytest.mark.nightly
def test_the_ranks_say_what_they_are_at(pack, tmp_path):
    pack()
    jobs = [job for job in verify.jobs_for("verified_models.Small", 2) if job.section == "training"]
    verify.verify(jobs, 2, timeout=100, progress=lambda job: None, notes=tmp_path / "notes")
    at, _, compared = (tmp_path / "notes").read_text().partition(", ")
    assert at in SECTIONS["training"].checks
    assert int(compared.split()[0]) > 100


@pytest.mark.nightly
def test_what_is_done_before_a_check_is_said_too(pack, tmp_path, monkeypatch):
    pack()
    said = []
    monkeypatch.setattr(type(tmp_path), "write_text", lambda self, text: said.append(text))
    jobs = [job for job in verify.jobs_for("verified_models.Small", 2) if job.section != "training"]
    verify.verify(jobs, 2, timeout=100, progress=lambda job: None, notes=tmp_path / "notes")
    assert said == [
        "starting ranks, which import torch: 0 of 2 are there",
        "starting ranks, which import torch: 1 of 2 are there",
        "ranks meet",
        "importing the pack and the model's library",
    ]


def test_steps_count_the_checks_of_all_jobs(pack):
    pack()
    jobs = verify.jobs_for("verified_models.Small", 2)
    assert [job.section for job in jobs] == ["plan", "training", "communication"]
    steps = Steps(jobs)
    assert steps.total == sum(len(SECTIONS[job.section].checks) for job in jobs) == 10
    steps.begin(jobs[0])
    assert (steps.done("starting ranks, which import torch: 0 of 2 are there"), steps.started) == (0, False)
    assert (steps.done("plan: building the model"), steps.started) == (0, True)
    steps.begin(jobs[1])
    assert [steps.done(note) for note in ("forward, 3 compared", "loss, 4 compared", "forward, 5 compared")] == [
        1,
        2,
        2,
    ]
    steps.begin(jobs[2])
    assert steps.done("communication, 0 compared") == 9


def test_at_a_terminal_what_the_ranks_are_at_is_seen_while_they_are(pack, capsys, monkeypatch):
    pack()
    jobs = verify.jobs_for("verified_models.Small", 2)
    at_a_terminal(monkeypatch, 100)
    with progress_bar(jobs, quiet=False) as (begin, notes):
        begin(jobs[0])
        for note in ("ranks meet", "plan: building the model"):
            notes.write_text(note)
            time.sleep(0.3)
        notes.write_text(
            "importing the pack and the model's library, whose name is too long for the line of a terminal"
        )
        time.sleep(0.3)
    shown = plain(capsys.readouterr().err)
    assert re.search(r"Small at tp 2 .* 0/\?\s.* ranks meet", shown)
    assert re.search(r"Small at tp 2 .* 0/10 .* plan: building the model", shown)
    assert re.search(r"Small at tp 2 ━+  0/10 \d:\d\d:\d\d importing the pack .*…", shown)
    with progress_bar(jobs, quiet=True) as (begin, notes):
        begin(jobs[0])
    assert (notes, capsys.readouterr().err) == (None, "")


@pytest.mark.nightly
def test_a_policy_that_is_wrong(pack):
    pack("wrong_state:CountedTwice")
    result = run("verified_models.Small", "--json")
    assert result.exit_code == 1
    found = json.loads(result.output)
    assert not found["passed"]
    states = {finding["check"]: finding for finding in found["findings"]}
    assert states["plan"]["state"] == states["names"]["state"] == "passed"
    assert states["gradients"]["state"] == "failed"
    assert states["gradients"]["error"] > 1e-3
    assert "norm1" in states["gradients"]["message"]
    assert all(isinstance(finding["hazards"], list) for finding in found["findings"])


@pytest.mark.nightly
def test_a_plan_that_fails_is_the_only_finding(pack):
    pack("wrong_plans:Misspelled")
    result = run("verified_models.Small")
    assert result.exit_code == 1
    assert "gate_proj" in result.output
    assert result.output.splitlines()[-1].startswith("FAILED: 1 of 1 checks of Small on 2 ranks with random weights")


@pytest.mark.nightly
def test_what_torch_lacks_is_no_model_that_was_verified(pack, tmp_path):
    (tmp_path / "kit_lacking.py").write_text(LACKING)
    pack("kit_lacking:Policy")
    result = run("verified_models.Small")
    assert result.exit_code == 1
    assert "torch has no such thing yet" in result.output
    assert "kit_lacking" not in sys.modules  # it changes the core, in the ranks of this call alone
    assert result.output.splitlines()[-1].startswith("FAILED: 1 of 1 checks of Small")


def test_what_cannot_be_verified_is_said(pack):
    pack()
    result = run("verified_models.Huge")
    assert result.exit_code == 1
    assert "parameters: comparing it in float64 on 2 ranks needs about" in result.output
    assert "GiB are free" in result.output
    assert run("verified_models.Missing").exit_code == 1
    assert run().exit_code == 2


def test_a_pack_goes_through_every_section(pack):
    pack()
    jobs = verify.jobs_for("kit", 2)
    assert {(job.subject.case.name, job.subject.tp) for job in jobs} == {("net", 1), ("net", 2)}
    assert {"case", "dropout", "generation", "state"} <= {job.section for job in jobs}
    assert [job.section for job in verify.jobs_for("shard-kit", 2)] == [job.section for job in jobs]
    with pytest.raises(ConfigError, match=r"no case of pack kit .* supports --tp 3"):
        verify.jobs_for("kit", 3)
    with pytest.raises(ConfigError, match=r"no pack 'shard-kti' is installed. Did you mean 'shard-kit'"):
        verify.jobs_for("shard-kti", 2)
    with pytest.raises(ConfigError, match=r"no class 'nothere' .*; or a pack: .*\bkit\b"):
        verify.jobs_for("nothere", 2)


def test_a_case_that_no_rank_can_be_sent(pack):
    pack(cases='["verified_models:hidden"]')
    result = run("kit")
    assert result.exit_code == 1
    assert "has loss=<function hidden.<locals>.<lambda>" in result.output
    assert "Write it as a function at the top level of a module" in result.output


def test_a_pack_without_cases(pack):
    pack(cases="[]")
    with pytest.raises(ConfigError, match="names no cases"):
        verify.jobs_for("kit", 2)
    with pytest.raises(ConfigError, match="has no conformance case for Small"):
        verify.jobs_for("verified_models.Small", 2)
