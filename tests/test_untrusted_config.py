"""A config.json is data: the command line imports nothing that it names, and asks nothing about it."""

from __future__ import annotations

import json
import sys
import types

import pytest
from click.testing import CliRunner

from shardcore_cli import main
from shardcore_transformers import models

transformers = pytest.importorskip("transformers")

SMALL = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 40,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 31,
}  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """Write a folder with a config.json, and a module beside it that leaves a mark when it is imported."""
    (tmp_path / "spy.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)

    def write(**changes):
        (tmp_path / "config.json").write_text(json.dumps({**SMALL, **changes}))
        return tmp_path

    yield write
    assert not (tmp_path / "ran").exists()
    assert sys.modules.pop("spy", None) is None


def run(*arguments, answer="y\n"):
    return CliRunner().invoke(main, list(map(str, arguments)), input=answer)


COMMANDS = [("explain",), ("verify",), ("new-pack", "shard-untrusted", "--model")]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize("name", ["spy.s", "spy", "torch.nn.Linear", "utils", "", "a b", 3, ["LlamaForCausalLM"]])
def test_an_architecture_is_a_model_of_transformers(checkpoint, command, name):
    result = run(*command, checkpoint(architectures=[name]))
    assert result.exit_code == 1
    assert "config.json" in result.output
    assert "names the architecture" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("value", ["LlamaForCausalLM", 3, {}, None, []])
def test_architectures_are_a_list(checkpoint, value):
    result = run("explain", checkpoint(architectures=value))
    assert result.exit_code == 1
    assert 'add "architectures": ["LlamaForCausalLM"]' in result.output


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_code_that_comes_with_a_checkpoint_is_refused_and_not_asked_about(checkpoint, command):
    folder = checkpoint(model_type="strange", auto_map={"AutoConfig": "spy.Config", "AutoModelForCausalLM": "spy.M"})
    result = run(*command, folder)
    assert result.exit_code == 1
    assert "Do you wish" not in result.output
    assert "needs code of its own (auto_map), which no command runs" in " ".join(result.output.split())
    assert "shardcore.shard" in result.output


def test_a_model_that_transformers_knows_needs_no_code_of_its_own(checkpoint):
    result = run("explain", checkpoint(auto_map={"AutoConfig": "spy.Config"}), "--tp", 2)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("value", ["somebody/kernel", {"": "somebody/kernel"}, {"text_config": "a/b@main:f"}])
def test_a_kernel_of_the_hub_is_code_too(checkpoint, value):
    result = run("explain", checkpoint(attn_implementation=value))
    assert result.exit_code == 1
    assert "attn_implementation" in result.output
    assert "code from the hub" in result.output


@pytest.mark.parametrize("text", ["[1]", "{", "\xff"])
def test_what_is_no_configuration(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    result = run("explain", tmp_path)
    assert result.exit_code == 1
    assert "config.json is no configuration: " in result.output


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("LlamaForCausallm", "Did you mean 'LlamaForCausalLM'?"),
        ("transformers.LlamaModle", "Did you mean 'LlamaModel'?"),
        ("meta-llama/Llama-3.1-8B", "the local cache of the hub holds no config.json"),
        ("NoSuchThingAtAll", "no class 'NoSuchThingAtAll' in transformers"),
    ],
)
def test_what_was_meant(name, hint):
    result = run("explain", name)
    assert result.exit_code == 1
    assert hint in result.output


@pytest.mark.parametrize("given", ["LlamaForCausalLM", "folder"])
def test_a_model_library_that_does_not_work_is_said(checkpoint, monkeypatch, given):
    broken = types.ModuleType("transformers")
    broken.__getattr__ = _refuse
    monkeypatch.setitem(sys.modules, "transformers", broken)
    result = run("explain", checkpoint() if given == "folder" else given)
    assert result.exit_code == 1
    assert result.output.startswith("error: ")
    assert "RuntimeError: its compiled part is gone" in result.output


def _refuse(name):
    raise RuntimeError("its compiled part is gone")


@pytest.mark.parametrize("source", ["raise ValueError('broken')", "import sys; sys.exit(0)", "x = ("])
def test_a_module_that_the_user_named_may_be_broken(tmp_path, monkeypatch, source):
    (tmp_path / "broken_models.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    result = run("explain", "broken_models.Net")
    assert result.exit_code == 1
    assert "error: no class 'Net' in module 'broken_models' (" in result.output


def test_a_class_of_the_users_own_is_imported_because_it_was_named(tmp_path, monkeypatch):
    (tmp_path / "named_models.py").write_text("from torch import nn\nclass Net(nn.Module):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert type(models.meta_model("named_models.Net")).__name__ == "Net"
    del sys.modules["named_models"]
