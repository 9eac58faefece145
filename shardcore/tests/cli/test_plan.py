"""``shardcore plan``: its options, its answers and its picture."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from shardcore.cli import main
from shardcore.cli.bars import picture
from shardcore.cli.plan import bytes_of, in_words
from shardcore.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "count"), [("80GiB", 80 * 2**30), ("80 GB", 80 * 10**9), ("1.5KiB", 1536), ("7", 7), ("2MB", 2 * 10**6)]
)
def test_amounts_of_memory(text, count):
    assert bytes_of(text) == count


@pytest.mark.parametrize("text", ["", "many", "80 Gigs", "-1GiB", "80gib"])
def test_what_is_no_amount_of_memory(text):
    with pytest.raises(ConfigError, match="80GiB"):
        bytes_of(text)


def test_bytes_in_words():
    assert [in_words(n) for n in (7, 2048, 3 * 2**30, 2**42)] == ["7 B", "2.0 KiB", "3.0 GiB", "4.0 TiB"]


def test_bars_and_the_limit_have_one_scale():
    sizes = {"parameters": 10, "gradients": 10, "optimizer": 20, "activations": 40}
    drawn = picture("<one> & two", [("tp 2", sizes), ("tp 4", {"parameters": 40})], 160)
    name = "{http://www.w3.org/2000/svg}"
    root = ElementTree.fromstring(drawn)
    assert root.find(f"{name}title").text == "<one> & two"
    bars = [rect for rect in root.iter(f"{name}rect") if rect.find(f"{name}title") is not None]
    widths = [float(bar.get("width")) for bar in bars]
    assert [width / widths[0] for width in widths] == pytest.approx([1, 1, 2, 4, 4], rel=0.01)
    line = root.find(f"{name}line")
    first = float(bars[0].get("x"))
    assert (float(line.get("x1")) - first) / widths[0] == pytest.approx(16, rel=0.01)


def run(*options):
    return CliRunner().invoke(main, ["plan", *options])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("Some", "--search"), "--ranks"),
        (("Some", "--search", "--ranks", "4", "--tp", "2"), "--tp"),
        (("Some", "--ranks", "4"), "--search"),
    ],
)
def test_options_that_contradict_each_other(options, said):
    result = run(*options)
    assert result.exit_code == 2
    assert said in result.output


def test_errors_are_messages():
    for options in (
        ("NoSuchModel",),
        ("NoSuchModel", "--memory", "much"),
        ("x", "--sp", "--set", "enable_sequence_parallelism=true"),
    ):
        result = run(*options)
        assert result.exit_code == 1
        assert "error:" in result.output


@pytest.fixture
def small(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("shard_llama")
    sizes = {"hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 5, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, vocab_size=96, architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path)
    return str(tmp_path)


def test_a_plan_as_json_and_as_a_picture(small, tmp_path):
    picture = tmp_path / "plan.svg"
    result = run(
        small, "--tp", "2", "--dp", "2", "--sp", "--seq", "16", "--memory", "1GiB", "--json", "--svg", str(picture)
    )
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["mesh"] == {"tp": 2, "dp_replicate": 1, "dp_shard": 2}
    assert data["fits"] is True
    assert data["workload"]["seq"] == 16
    assert data["bytes"]["optimizer"] >= 2 * data["bytes"]["parameters"]
    parts = [size for name, size in data["peak"].items() if name != "phase"]
    assert sum(parts) == data["bytes"]["peak"]
    assert {c["axis"] for c in data["collectives"]} == {"tp", "dp_shard"}
    assert data["sent"] == sum(c["sent"] for c in data["collectives"])
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")


def test_a_step_that_does_not_fit(small):
    result = run(small, "--tp", "2", "--seq", "16", "--memory", "1KiB")
    assert result.exit_code == 1
    assert "does not fit into 1.0 KiB" in result.output


def test_a_search(small):
    result = run(small, "--search", "--ranks", "2", "--seq", "16", "--json")
    assert result.exit_code == 0, result.output
    meshes = json.loads(result.stdout)["meshes"]
    assert len(meshes) == 3
    costs = [mesh["plan"]["sent_per_sample"] for mesh in meshes]
    assert costs == sorted(costs)
    nothing = run(small, "--search", "--ranks", "2", "--seq", "16", "--memory", "1KiB")
    assert nothing.exit_code == 1
    assert "no mesh fits" in nothing.output
