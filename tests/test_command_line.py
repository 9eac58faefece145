"""The command line with a real pack: plans of real models, without weights."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from shardcore.cli import main

transformers = pytest.importorskip("transformers")


def run(*arguments: str) -> str:
    result = CliRunner().invoke(main, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


def test_a_class_name() -> None:
    text = run("explain", "LlamaForCausalLM", "--tp", "4")
    assert "LlamaForCausalLM by shard_llama.policy.LlamaForCausalLMPolicy (shard-llama " in text
    assert "model.layers.{0-31}.self_attn.q_proj" in text
    assert "collectives per step: 65 all_reduce forward, 1 all_gather forward, 65 all_reduce backward" in text


def test_a_folder_and_a_file(tmp_path) -> None:
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=83, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1,
        vocab_size=97, architectures=["LlamaForSequenceClassification"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    by_folder = json.loads(run("explain", str(tmp_path), "--tp", "4", "--json"))
    by_file = json.loads(run("explain", str(tmp_path / "config.json"), "--tp", "4", "--json"))
    assert by_folder == by_file
    assert by_folder["plan"]["model"].endswith("LlamaForSequenceClassification")
    shared = [c for c in by_folder["collectives"] if "k_proj" in c["payload"]]
    # The KV head is on all four ranks: for each layer its parts are gathered, and its gradients summed, at once.
    assert [c["operation"] for c in shared] == ["all_gather", "reduce_scatter"] * 2


def test_the_pack_is_listed() -> None:
    rows = {row["name"]: row for row in json.loads(run("packs", "--json"))}
    assert rows["llama"]["status"] == "loaded"
    assert len(rows["llama"]["classes"]) == 5
    assert rows["llama"]["tested"][0]["library"] == "transformers"
