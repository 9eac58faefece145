"""The command line without any model library: packs are real distributions in a folder on `sys.path`."""

from __future__ import annotations

import importlib
import json
import runpy
import sys

import pytest
from click.testing import CliRunner

from shardcore.plugins.registry import GROUP, default_registry
from shardcore_cli import main
from shardcore_planner.cli import explain, plan
from shardcore_planner.cli.explain import difference

MODEL = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

class Other(nn.Module):
    pass

class NeedsSize(nn.Module):
    def __init__(self, size):
        super().__init__()

NOT_A_MODEL = 3
"""

POLICY = """
from shardcore import Policy
from shardcore.styles import region, vocab

class NetPolicy(Policy):
    def module_policy(self):
        return {"Net": [vocab("embed"), region(col="up", row="down")]}
"""

PLUGIN = """
from shardcore.hooks import PolicySpec, hookimpl

@hookimpl
def shardcore_policies():
    return [PolicySpec(target="cli_models.Net", policy="shard_net.policy:NetPolicy")]
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder with a model, the pack that serves it, and room for more."""
    (tmp_path / "cli_models.py").write_text(MODEL)
    install(tmp_path, "net", PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    default_registry.cache_clear()
    for name in [n for n in sys.modules if n.startswith(("cli_models", "shard_net", "shard_bad", "shard_old"))]:
        del sys.modules[name]


def install(root, name, plugin, requires=""):
    package = root / f"shard_{name}"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "plugin.py").write_text(plugin)
    (package / "policy.py").write_text(POLICY)
    info = root / f"shard_{name}-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: shard-{name}\nVersion: 1.5\n{requires}")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = shard_{name}.plugin\n")
    importlib.invalidate_caches()
    default_registry.cache_clear()


def run(*arguments):
    return CliRunner().invoke(main, list(arguments))


def test_the_package_is_the_command(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["anything", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("shardcore_cli", run_name="__main__", alter_sys=False)
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("shardcore, version ")


def test_the_list_of_commands_cuts_no_sentence():
    listed = CliRunner().invoke(main, ["--help"], terminal_width=80).output.partition("Commands:")[2]
    assert "packs" in listed
    assert "..." not in listed


def test_help_teaches():
    text = " ".join(run("--help").output.split())
    assert "see: shardcore packs" in text
    assert "Exit codes: 0 all is well" in text
    assert "shardcore explain LlamaForCausalLM --tp 4" in run("explain", "--help").output


def test_packs(site):
    result = run("packs")
    assert result.exit_code == 0
    head, *lines = result.output.splitlines()
    assert head.split("\t") == ["pack", "distribution", "status", "serves", "tested with"]
    (line,) = [line for line in lines if line.startswith("net\t")]
    assert line.split("\t")[1:4] == ["shard-net 1.5", "loaded", "Net"]
    assert "plugin.py" not in line
    (line,) = [line for line in run("packs", "-v").output.splitlines() if line.startswith("net\t")]
    assert line.endswith("plugin.py")


def test_packs_as_json(site, monkeypatch):
    install(site, "old", PLUGIN, 'Provides-Extra: tested\nRequires-Dist: torch<1; extra == "tested"\n')
    rows = {row["name"]: row for row in json.loads(run("packs", "--json").output)}
    assert rows["net"]["classes"] == ["cli_models.Net"]
    assert rows["net"]["tested"] == []
    (tested,) = rows["old"]["tested"]
    assert (tested["library"], tested["range"], tested["inside"]) == ("torch", "<1", False)
    monkeypatch.setenv("SHARDCORE_DISABLE_PACKS", "net")
    rows = {row["name"]: row for row in json.loads(run("packs", "--json").output)}
    assert rows["net"]["status"] == "blocked"


def test_a_broken_pack_is_an_exit_code(site):
    install(site, "bad", "raise RuntimeError('no luck')\n")
    result = run("packs")
    assert result.exit_code == 1
    assert "broken; RuntimeError: no luck" in result.output
    assert "pack bad (shard-bad 1.5)\tfails\tRuntimeError: no luck" in run("doctor", "--quick").output


def test_explain(site):
    assert "weight (12, 8)" not in run("explain", "cli_models.Net", "--tp", "2").output
    result = run("explain", "cli_models.Net", "--tp", "2", "-v")
    assert result.exit_code == 0, result.output
    assert "bytes of a step: not known (it is not known how to call a Net" in result.output
    assert "Net by shard_net.policy.NetPolicy (shard-net 1.5), tp 2, digest" in result.output
    assert "weight (12, 8) -> (6, 8)  split on dim 0" in result.output
    assert "collectives per step: 2 all_reduce forward, 1 all_reduce backward" in result.output
    assert "parameters per rank: 600 B of 1.1 KiB, in float32\n" in result.output


def test_what_policies_and_models_print_is_no_part_of_the_answer(site, capfd):
    for file in (site / "shard_net" / "policy.py", site / "cli_models.py"):
        file.write_text("import os\nprint('printed')\nos.write(1, b'written\\n')\n" + file.read_text())
    with pytest.raises(SystemExit) as caught:
        main(["explain", "cli_models.Net", "--tp", "2", "--json"])
    assert caught.value.code == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["plan"]["model"].endswith("Net")
    assert err.count("written\n") == err.count("printed\n") == 2


def test_explain_as_json_and_diff(site):
    plans = {}
    for ranks in (2, 4):
        result = run("explain", "cli_models.Net", "--tp", str(ranks), "--json")
        plans[ranks] = json.loads(result.output)
        (site / f"{ranks}.json").write_text(result.output)
    assert plans[2]["bytes_per_rank"] == [4 * (40 + 48 + 6 + 48 + 8)] * 2
    assert {c["where"] for c in plans[2]["collectives"]} == {"embed", "up", "down"}
    same = run("explain", "--diff", str(site / "2.json"), str(site / "2.json"))
    assert (same.exit_code, same.output) == (0, "the plans are equal\n")
    other = run("explain", "--diff", str(site / "2.json"), str(site / "4.json"))
    assert other.exit_code == 1
    assert "! plan.config.tensor_parallel_size: 2 -> 4" in other.output


def test_settings_reach_the_plan(site):
    settings = ["inference_only=true", "enable_flash_attention=auto", "enable_fused_normalization=False"]
    result = run("explain", "cli_models.Net", "--tp", "2", "--device", "cuda", "-v", *(f"--set={s}" for s in settings))
    assert result.exit_code == 0, result.output
    assert "enable_flash_attention: off: NetPolicy knows no other attention for its model" in result.output
    assert "eval mode, no gradients" in result.output
    assert "collectives per step: 2 all_reduce forward\n" in result.output
    for value, words in (("0.5", "gradient_checkpointing_ratio=0.5"), ("2", "num_ckpt_layers=2")):
        result = run("explain", "cli_models.Net", "--set", f"gradient_checkpoint_config={value}")
        assert result.exit_code == 1  # its policy names no blocks
        assert words in result.output


def test_what_a_user_names_is_also_looked_for_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "cli_models_here.py").write_text(f"{MODEL}\ndef example():\n    return 3, {{}}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    before = list(sys.path)
    run("explain", "LlamaForNothing")
    assert sys.path == before  # which is no module's name
    assert "no installed pack serves cli_models_here.Other" in run("explain", "cli_models_here.Other").output
    sys.path[:] = before
    drafted = run("new-pack", "shard-here", "--example", "cli_models_here:example")
    assert "cli_models_here:example returned a int and a dict; wanted a model" in drafted.output
    del sys.modules["cli_models_here"]


def test_a_policy_is_drafted_on_request(site, monkeypatch):
    asked = []
    net_policy = importlib.import_module("shard_net.policy").NetPolicy
    drafted = type("Drafted", (net_policy,), {})
    for command in (explain, plan):
        monkeypatch.setattr(command, "inference", lambda: lambda *how: asked.append(how[1:]) or drafted)
    result = run("explain", "cli_models.Net", "--tp", "2", "--policy", "infer")
    assert ".Drafted, tp 2" in result.output
    assert "it is not known how to call a Net" in run("plan", "cli_models.Net", "--policy", "infer").output
    assert asked == [("drafted", None)] * 2


def test_differences_name_places():
    before = {"steps": [{"path": "a", "target": "x"}], "gone": 1}
    after = {"steps": [{"path": "a", "target": "y"}], "new": 2}
    assert difference(before, after) == ["! steps[a].target: x -> y", "- gone: 1", "+ new: 2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "cli_models.Missing"], "error: no class 'Missing' in module 'cli_models'"),
        (["explain", "cli_models.NOT_A_MODEL"], "error: cli_models.NOT_A_MODEL is not a model class"),
        (["explain", "nowhere/config.json"], "error: nowhere/config.json: there is no such file"),
        (["explain", "cli_models.Other"], "cli_models.Other"),
        (["explain", "cli_models.Other"], "cli_models.Other.\n  way out: have a pack drafted: shardcore new-pack "),
        (["explain", "cli_models.NeedsSize"], "cli_models.NeedsSize: NeedsSize could not be built: TypeError: "),
        (["explain", "cli_models.Net", "--set", "nonsense"], "'nonsense' is no setting; wanted name=value, such as "),
        (["explain", "cli_models.Net", "--set", "colour=red"], "unknown configuration field 'colour'."),
        (["explain", "cli_models.Net", "--set", "pipeline_schedule=2f2b"], "pipeline_schedule must be one of "),
        (["explain", "cli_models.Net", "--set", "inference_only=maybe"], "must be True or False, got 'maybe'"),
        (["explain", "cli_models.Net", "--set", "extra_kwargs={{[]: 1}}"], "extra_kwargs must be a mapping of names"),
        (
            ["explain", "cli_models.Net", "--set", "inference_only=true", "--set", "inference_only=false"],
            "the setting inference_only is given twice; give it once",
        ),
        (["explain", "cli_models.Net", "--set", "enable_flash_attention=true"], "flash attention is impossible: "),
        (["explain", "cli_models.Net", "--set", "tp=2"], "tensor_parallel_size 2 times data_parallel_size 1 is 2"),
        (["explain", "--diff", "{site}/cli_models.py", "{site}/cli_models.py"], "cli_models.py is no JSON file: "),
        (["explain", "--diff", "{site}/empty.json", "{site}/empty.json"], "empty.json holds no plan; save one with: "),
    ],
)
def test_errors_are_messages(site, arguments, message):
    (site / "empty.json").write_text("{}")
    result = run(*(argument.format(site=site) for argument in arguments))
    assert result.exit_code == 1
    assert message in result.output
    assert "Traceback" not in result.output
    assert "policy=" not in result.output  # which nobody can pass from here


def test_the_command_line_is_checked(site):
    assert run("explain").exit_code == 2
    assert "MODEL is missing" in run("explain").output
    assert run("explain", "cli_models.Net", "--tp", "0").exit_code == 2


@pytest.mark.ranks
def test_doctor():
    result = run("doctor", "--json")
    findings = json.loads(result.output)
    assert {"python", "torch", "shardcore"} <= findings["versions"].keys()
    states = {check["what"]: check for check in findings["checks"]}
    assert states["gloo"]["state"] in ("works", "missing")
    assert all(check["why"] for check in findings["checks"])
    assert {check["state"] for check in findings["checks"]} <= {"works", "missing", "fails"}
    assert states["an all-reduce"]["state"] == "works"
