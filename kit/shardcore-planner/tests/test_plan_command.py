"""``shardcore plan``: its options, its answers and its picture."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from terminals import at_a_terminal, plain

from shardcore.config import GradientCheckpointConfig, ShardConfig
from shardcore.config.pipelining import SCHEDULE_NAMES
from shardcore.errors import ConfigError
from shardcore_cli import main
from shardcore_cli.tables import in_words
from shardcore_planner import Estimate, Workload
from shardcore_planner.cli import plan
from shardcore_planner.cli.advice import advice
from shardcore_planner.cli.bars import picture
from shardcore_planner.cli.plan import bytes_of
from shardcore_planner.commands import _OPTIMIZERS, _SCHEDULES
from shardcore_planner.workload import OPTIMIZERS


@pytest.mark.parametrize(
    ("text", "count"), [("80GiB", 80 * 2**30), ("80 GB", 80 * 10**9), ("1.5KiB", 1536), ("7B", 7), ("2MB", 2 * 10**6)]
)
def test_amounts_of_memory(text, count):
    assert bytes_of(text) == count


@pytest.mark.parametrize("text", ["", "many", "80", "80 Gigs", "-1GiB", "80gib"])
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


def test_names_of_bars_have_room_and_sizes_their_unit():
    svg = "{http://www.w3.org/2000/svg}"
    name = "tp 2 x dp_shard 2 x dp_replicate 2: rank 3 on pp"
    root = ElementTree.fromstring(picture("small", [(name, {"parameters": 1536, "gradients": 512})], 4096))
    texts = {text.text: text for text in root.iter(f"{svg}text")}
    assert {"2.0 KiB", "4.0 KiB"} <= texts.keys()
    assert float(texts[name].get("x")) > 7 * len(name)
    titles = [title.text for title in root.iter(f"{svg}title")]
    assert f"{name}, parameters: 1.5 KiB" in titles
    bars = [rect for rect in root.iter(f"{svg}rect") if rect.find(f"{svg}title") is not None]
    end = max(float(bar.get("x")) + float(bar.get("width")) for bar in bars)
    assert end < float(texts["2.0 KiB"].get("x")) < end + 10
    assert float(texts["4.0 KiB"].get("x")) > end + 100


def test_a_picture_has_colours_for_a_dark_screen():
    root = ElementTree.fromstring(picture("small", [("tp 2", {"parameters": 1})], None))
    (style,) = root.iter("{http://www.w3.org/2000/svg}style")
    assert "prefers-color-scheme: dark" in style.text
    back = next(root.iter("{http://www.w3.org/2000/svg}rect"))
    assert (back.get("class"), back.get("width")) == ("back", root.get("width"))


def run(*options):
    return CliRunner().invoke(main, ["plan", *options])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("Some", "--search"), "--ranks"),
        (("Some", "--search", "--ranks", "4", "--tp", "2"), "--tp"),
        (("Some", "--search", "--ranks", "4", "--pp", "2"), "--pp"),
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
        ("x", "--schedule", "gpipe"),
        ("x", "--search", "--ranks", "4", "--set", "pp=2"),
        ("x", "--pp", "2", "--microbatches", "2", "--microbatch-size", "1"),
    ):
        result = run(*options)
        assert result.exit_code == 1
        assert "error:" in result.output


def test_the_choices_are_those_of_the_configuration_and_the_planner():
    assert _SCHEDULES == SCHEDULE_NAMES
    assert tuple(OPTIMIZERS) == _OPTIMIZERS


def _saved(folder, config, architecture, **settings):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 5, "num_attention_heads": 4}
    made = getattr(transformers, config)(**sizes, **settings, vocab_size=96, architectures=[architecture])
    made.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def small(tmp_path):
    pytest.importorskip("shard_llama")
    return _saved(tmp_path, "LlamaConfig", "LlamaForCausalLM")


@pytest.fixture
def tied(tmp_path):
    pytest.importorskip("shard_bert")
    return _saved(tmp_path, "BertConfig", "BertForMaskedLM")


def test_ranks_that_divide_the_tokens_keep_their_part_of_them(small):
    kept = {}
    for ranks in (1, 4):
        result = run(small, "--cp", str(ranks), "--seq", "512", "--set", "parallel_output=true", "--json")
        assert result.exit_code == 0, result.output
        data = json.loads(result.stdout)
        assert data["mesh"]["cp"] == ranks
        kept[ranks] = data["bytes"]["activations"]
    assert kept[4] <= 1.15 * kept[1] / 4  # of five blocks: what is in front of them and behind them is whole


def test_a_plan_as_json_and_as_a_picture(small, tmp_path):
    picture = tmp_path / "plan.svg"
    result = run(
        small, "--tp", "2", "--dp", "2", "--sp", "--seq", "16", "--memory", "1GiB", "--json", "--svg", str(picture)
    )
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["mesh"] == {"pp": 1, "cp": 1, "tp": 2, "dp_replicate": 1, "dp_shard": 2}
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
    assert "temporaries of the optimizer\t\t47.3 KiB\n" in result.output
    assert result.output.endswith("to make it fit, try --optimizer adamw-fused or more ranks (--tp, --dp, --pp)\n")


RECOMPUTED = GradientCheckpointConfig(gradient_checkpointing_ratio=1.0)


@pytest.mark.parametrize(
    ("phase", "work", "fields", "said"),
    [
        ("backward", {"batch": 4}, {"tp": 2}, "--sp, --checkpointing, a smaller --batch or more"),
        ("backward", {}, {"tp": 2, "gradient_checkpoint_config": RECOMPUTED}, "--sp or more"),
        ("forward", {"optimizer": "none"}, {"tp": 1}, "more"),
        ("optimizer", {"batch": 4}, {"tp": 2}, "--optimizer adamw-fused or more"),
        ("optimizer", {"optimizer": "adamw-fused"}, {"tp": 2}, "more"),
    ],
)
def test_what_may_help_was_not_asked_for_and_takes_from_the_peak(phase, work, fields, said):
    estimate = Estimate(
        config=ShardConfig.of(**fields),
        workload=Workload(**work),
        held={},
        kept=0,
        peak=1,
        peak_phase=phase,
        at_peak={"temporaries": 1},
        traffic=(),
        operations={},
        calls={},
        device={},
    )
    assert advice([plan.alone(estimate)], "more") == said


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


def test_of_a_long_path_a_title_shows_the_end(small):
    found = plan.search(small, ShardConfig(), Workload(seq=16), ranks=1, max_tp=1, memory=None)[0].estimate
    assert plan.headline("a" * 40, found).startswith("a" * 40 + ", ")
    assert plan.headline(f"/{'a' * 60}/run/llama", found).startswith("…/run/llama, ")
    assert plan.headline("a" * 41, found).startswith(f"…{'a' * 39}, ")


def test_at_a_terminal_meshes_can_be_compared_and_what_does_not_fit_is_red(small, capsys, monkeypatch):
    at_a_terminal(monkeypatch)
    config, workload = ShardConfig(), Workload(seq=16)
    found = plan.search(small, config, workload, ranks=4, max_tp=4, memory=None)
    plan.show_search(small, found, None)
    text = plain(capsys.readouterr().out)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    assert ["4", "1", "1", "yes"] in [row[:4] for row in rows]
    assert len(rows) == len(found)
    assert max(map(len, text.splitlines())) <= 80
    assert found[0].estimate is not None
    for limit, said in ((1, "\x1b[1;31mpeak"), (2**40, "\x1b[32mpeak")):
        plan.show(small, found[0].estimate, limit)
        assert said in capsys.readouterr().out


def test_a_pipeline(small, tmp_path):
    picture = tmp_path / "plan.svg"
    result = run(small, "--pp", "2", "--tp", "2", "--microbatches", "3", "--seq", "16", "--json", "--svg", str(picture))
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["mesh"] == {"pp": 2, "cp": 1, "tp": 2, "dp_replicate": 1, "dp_shard": 1}
    assert data["workload"]["batch"] == 3
    pipeline = data["pipeline"]
    assert (pipeline["schedule"], pipeline["micro_batches"]) == ("1f1b", 3)
    assert [rank["in_flight"] for rank in pipeline["ranks"]] == [2, 1]
    assert data["bytes"]["peak"] == max(rank["bytes"]["peak"] for rank in pipeline["ranks"])
    crossing = 3 * 16 * 32 * 2  # micro-batches of a row of bf16
    for rank, way in zip(pipeline["ranks"], ("forward", "backward"), strict=True):
        (sent,) = [c for c in rank["collectives"] if c["axis"] == "pp"]
        assert (sent["phase"], sent["operation"], sent["count"], sent["bytes"]) == (way, "send", 3, crossing)
        assert rank["bytes"]["buffers"] == crossing
    assert "rank 1 on pp" in picture.read_text()


def test_a_pipeline_as_tables(tied):
    result = run(tied, "--pp", "2", "--schedule", "zbv", "--microbatch-size", "2", "--seq", "16", "--optimizer", "sgd")
    assert result.exit_code == 0, result.output
    assert "pp 2, batch 8, 16 tokens, zbv of 4 micro-batches" in result.output
    assert "0, 3\t4\t" in result.output
    assert "bubble: ranks of the pipeline wait " in result.output
    shared = run(tied, "--pp", "2", "--microbatches", "2", "--seq", "16")
    assert "backward\texchange\tpp\t2\t1\t6.0 KiB\t6.0 KiB" in shared.output


def test_a_pipeline_that_cannot_be(small):
    for options, said in (
        (("--pp", "8"), "at most 5"),
        (("--pp", "2", "--microbatches", "2", "--batch", "3"), "plan with a batch that they divide"),
        (("--pp", "2", "--microbatches", "1"), "another number of micro-batches"),
    ):
        result = run(small, *options)
        assert result.exit_code == 1
        assert said in result.output


def explained(*options):
    result = CliRunner().invoke(main, ["explain", *options])
    assert result.exit_code == 0, result.output
    return result.output


def test_numbers_are_in_the_dtype_of_the_configuration(tmp_path):
    pytest.importorskip("shard_llama")
    saved = _saved(tmp_path, "LlamaConfig", "LlamaForCausalLM", dtype="float16")
    lines = explained(saved, "--tp", "2").splitlines()
    assert any(line.startswith("parameters per rank: ") and line.endswith(", in float16") for line in lines)
    assert "all in fp16, with adamw" in lines[-1]
    for options, dtype in (((), "fp16"), (("--dtype", "fp32"), "fp32")):
        assert json.loads(run(saved, "--tp", "2", "--json", *options).output)["workload"]["dtype"] == dtype


def test_what_is_quantized_is_not_planned_so_and_adapters_are(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("shard_llama")
    pytest.importorskip("peft")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "vocab_size": 97}
    quantization = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4, dtype="bfloat16")
    text = {**config.to_dict(), "architectures": ["LlamaForCausalLM"], "quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(text))
    options = ["plan", str(tmp_path), "--tp", "2", "--seq", "8", "--json"]
    whole, some = (CliRunner().invoke(main, [*options, *more]) for more in ([], ["--lora", "4"]))
    explained = CliRunner().invoke(main, ["explain", str(tmp_path), "--tp", "2"])
    for result in (whole, explained):
        assert "quantization_config (bitsandbytes) is not planned: weights are counted as if not" in result.stderr
    held, adapters = (json.loads(result.stdout)["bytes"] for result in (whole, some))
    assert adapters["parameters"] > held["parameters"] == held["gradients"]
    assert adapters["gradients"] < held["gradients"]
    refused = CliRunner().invoke(main, [*options, "--lora", "4", "--optimizer", "none"])
    assert "Workload.lora trains adapters" in refused.output


def test_what_both_commands_have_is_said_alike(small):
    wished = ("--set", "enable_sequence_parallelism=true")
    assert explained(small, "--tp", "2", "--sp", "--json") == explained(small, "--tp", "2", *wished, "--json")
    assert run(small, "--tp", "2", "--sp", "--memory", "80GiB").output.splitlines()[-1].endswith("fits into 80.0 GiB")


def test_the_stages_of_a_pipeline(small):
    lines = explained(small, "--tp", "2", "--pp", "2").splitlines()
    start = lines.index(next(line for line in lines if line.startswith("stage\t")))
    first, last = (dict(zip(lines[start].split("\t"), line.split("\t"), strict=True)) for line in lines[start + 1 :])
    assert (first["blocks"], last["blocks"]) == ("model.layers.{0-2}", "model.layers.{3-4}")
    assert "model.embed_tokens" in first["also"]
    assert {"model.norm", "lm_head"} <= set(last["also"].split(", "))
    data = json.loads(explained(small, "--tp", "2", "--pp", "2", "--set", "pipeline_schedule=interleaved", "--json"))
    assert [stage["rank"] for stage in data["stages"]] == [0, 1, 0, 1]
    assert sum(stage["share"] for stage in data["stages"]) == pytest.approx(1)
    whole = json.loads(explained(small, "--tp", "2", "--json"))
    assert "stages" not in whole
    assert len(data["bytes_per_rank"]) == 4
    assert data["bytes_per_rank"][0] + data["bytes_per_rank"][2] == whole["bytes_per_rank"][0]


def test_what_stages_share(tied):
    stages = json.loads(explained(tied, "--pp", "3", "--json"))["stages"]
    tie = "bert.embeddings.word_embeddings.weight"
    assert [stage["shared"] for stage in stages] == [{tie: [0, 2]}, {}, {tie: [0, 2]}]
    assert f"{tie} (2)" in explained(tied, "--pp", "3")
