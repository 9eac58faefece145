"""The command line with a real pack: plans of real models, without weights."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from shardcore_cli import main

transformers = pytest.importorskip("transformers")


def run(*arguments: str) -> str:
    result = CliRunner().invoke(main, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


def test_a_class_name() -> None:
    text = run("explain", "LlamaForCausalLM", "--tp", "4", "-v")
    assert "LlamaForCausalLM by shard_llama.policy.LlamaPolicy (shard-llama " in text
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


def test_the_summary_comes_first_and_internals_behind_v() -> None:
    text = run("explain", "LlamaForCausalLM", "--tp", "4")
    lines = text.splitlines()
    assert "parameters per rank: 6.3 GiB of 25.1 GiB, in float32" in lines
    assert "    split over tp: 226 weights, 6.3 GiB of 25.1 GiB" in lines
    assert "    whole on each rank: 65 weights, 1.0 MiB of 1.0 MiB" in lines
    planned = json.loads(run("plan", "LlamaForCausalLM", "--tp", "4", "--json"))
    (said,) = [line for line in lines if line.startswith("bytes of a step: ")]
    sent, peak = re.findall(r"([\d.]+) GiB", said)
    assert float(sent) == pytest.approx(planned["sent"] / 2**30, abs=0.05)
    assert float(peak) == pytest.approx(planned["bytes"]["peak"] / 2**30, abs=0.05)
    assert "ColumnLinear" not in text
    assert "ColumnLinear" in run("explain", "LlamaForCausalLM", "--tp", "4", "-v")


@pytest.fixture
def small(tmp_path) -> str:
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=83, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=97, max_position_embeddings=64, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    return str(tmp_path)


class _Page(HTMLParser):
    """Collects what a browser would fetch, the elements that are not closed, and the text."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str | None] = []
        self.open: list[str] = []
        self.said: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.said.append(data)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("command", "options", "said"),
    [
        ("explain", ["--tp", "2", "--dp", "2"], ["model.layers.{0-1}.self_attn.q_proj.weight", "32 x 64"]),
        ("explain", ["--tp", "2", "--pp", "2"], ["Stages", "Schedule: 1f1b"]),
        ("plan", ["--tp", "2", "--memory", "1GiB"], ["What is sent in a step", "The line is the limit: 1.0 GiB."]),
        ("plan", ["--tp", "2"], ["Cuts over tp 2", "model.layers.{0-1}.self_attn.q_proj.weight", "32 x 64"]),
        ("plan", ["--pp", "2", "--tp", "2"], ["Cuts over tp 2", "model.layers.{0-1}.self_attn.q_proj.weight"]),
        ("plan", ["--search", "--ranks", "4"], ["tp 4", "dp_shard 4", "lm_head.weight"]),
    ],
)
def test_a_page_is_whole_in_itself(small, tmp_path, command, options, said) -> None:
    run(command, small, *options, "--html", str(tmp_path / "page.html"))
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    page = _Page()
    page.feed(text)
    assert page.open == []
    assert page.fetched == []
    assert not re.search(r"<script|@import|url\(", text)
    assert set(said) <= {data.strip() for data in page.said}
    for row in re.findall(r'<div class="row">.*</div>', text):  # the size stands where the bar ends
        assert re.search(r"</i><span>[\d.]+ [KMG]?i?B</span>(<b [^>]*></b>)?</div></div>$", row)
    for row in re.findall(r"<tr><td><svg.*?</tr>", text, re.S):  # on a phone each size says what it is of
        assert re.findall(r'data-of="([^"]*)"', row) == ["whole", "of a rank", "how"]


def test_a_picture_of_the_mesh_and_the_cuts(small, tmp_path) -> None:
    run("explain", small, "--tp", "2", "--dp", "2", "--svg", str(tmp_path / "mesh.svg"))
    root = ElementTree.parse(tmp_path / "mesh.svg").getroot()
    said = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert [int(text) for text in said if text.isdigit()] == [0, 1, 2, 3]
    plan = json.loads(run("explain", small, "--tp", "2", "--dp", "2", "--json"))["plan"]
    names = {re.sub(r"\.\d+\.", ".{0-1}.", parameter["name"]) for parameter in plan["parameters"]}
    assert names <= set(said)
    assert said[said.index("model.layers.{0-1}.self_attn.q_proj.weight") + 1] == (
        "64 x 64, of a rank 32 x 64, split on dim 0"
    )
    assert said[said.index("model.norm.weight") + 1] == "64, replicated"
    width = float(root.get("width"))
    assert all(float(text.get("x")) + 7 * len(text.text) < width for text in root.iter() if text.text in names)


def test_a_model_of_the_hub_is_looked_up_in_the_local_cache(tmp_path, monkeypatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=83, num_hidden_layers=2, num_attention_heads=4, vocab_size=97,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    for name in ("models--someone--small", "models--small-one", "models--small2.5-one"):
        snapshot = tmp_path / name / "snapshots" / ("0" * 40)
        config.save_pretrained(snapshot)
        (tmp_path / name / "refs").mkdir()
        (tmp_path / name / "refs" / "main").write_text("0" * 40)
    for name in ("someone/small", "small-one", "small2.5-one"):
        assert "LlamaForCausalLM by" in run("explain", name, "--tp", "2")
    result = CliRunner().invoke(main, ["explain", "someone/else"])
    assert result.exit_code == 1
    assert "no command asks the network. Fetch it first: hf download someone/else config.json" in result.output


@pytest.mark.parametrize("name", ["gpt2", "bert-base-uncased", "Qwen2.5-0.5B"])
def test_a_name_without_an_owner_may_be_of_the_hub_too(name) -> None:
    result = CliRunner().invoke(main, ["explain", name])
    assert result.exit_code == 1
    assert f"no class {name!r} in transformers, and the local cache of the hub holds no config.json" in result.output
    assert f"hf download {name} config.json" in result.output
