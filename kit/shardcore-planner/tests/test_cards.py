"""How long a step takes: of what that is made, and beside what was measured on a card."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter

import pytest
import torch
from click.testing import CliRunner

from shardcore.config import ShardConfig
from shardcore.errors import ConfigError
from shardcore_cli import main
from shardcore_planner import Card, Estimate, Link, Traffic, Workload, calibrating, estimate
from shardcore_planner.calls import call_of
from shardcore_planner.cli.plan import alone, show_search
from shardcore_planner.search import ordered
from shardcore_planner.watch import Watch

#: Numbers that are easily told apart: 1 TFLOP/s, 1 GB/s, 1 ms for each operation that is called.
PLAIN = Card(name="plain", device="cpu", products={"fp32": 1e12}, memory=1e9, call=1e-3)


def test_an_operation_takes_the_longer_of_its_products_and_its_memory():
    a, b, far = torch.ones(64, 32), torch.ones(32, 16), dataclasses.replace(PLAIN, memory=1e15)
    found = []
    for card in (PLAIN, far):
        with Watch(card=card) as watch:
            _ = a.t().t() @ b
        found.append(watch.work)
    moved = 4 * (64 * 32 + 32 * 16 + 64 * 16)
    assert [work["device", "forward"] for work in found] == [moved, round(2 * 64 * 32 * 16 / 1e3)]
    assert all(work["calls", "forward"] == 3 for work in found)  # views are called, and compute nothing
    with pytest.raises(ConfigError, match=r"no rate for products in fp64, only in fp32"), Watch(card=PLAIN):
        _ = a.double() @ b.double()


def test_an_accelerator_computes_while_the_host_goes_on():
    assert PLAIN.computing(2.0, 3.0) == 5.0
    assert dataclasses.replace(PLAIN, device="cuda").computing(2.0, 3.0) == 3.0


def _estimate(tp: int, card: Card, **fields):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("shard_llama")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, vocab_size=64
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    batch = 2 * fields.get("pipeline_parallel_size", 1)
    workload = Workload(dtype="fp32", seq=16, device="cpu", card=card, batch=batch)
    return estimate(model, ShardConfig(tensor_parallel_size=tp, **fields), workload, call_of)


def test_what_is_sent_is_sent_beside_what_is_computed_or_after_it():
    alone = _estimate(1, PLAIN).time
    assert (alone.sending, alone.unknown, alone.least, alone.most) == (0, (), alone.computing, alone.computing)
    linked = _estimate(2, dataclasses.replace(PLAIN, links={"tp": Link(rate=1e6, latency=0.5)}))
    count, sent = sum(t.count for t in linked.traffic), linked.sent
    assert linked.time.sending == pytest.approx(0.5 * count + sent / 1e6)
    assert linked.time.least == max(linked.time.computing, linked.time.sending)
    assert linked.time.most == linked.time.computing + linked.time.sending
    for links, unknown in [({"dp_shard": Link(rate=1.0)}, ("tp",)), ({"": Link(rate=1e9)}, ())]:
        work = dataclasses.replace(linked.workload, card=dataclasses.replace(PLAIN, links=links))
        assert dataclasses.replace(linked, workload=work).time.unknown == unknown


def test_blocks_that_are_left_out_are_counted_and_ranks_of_a_pipeline_wait():
    whole, staged = _estimate(1, PLAIN), _estimate(1, PLAIN, pipeline_parallel_size=2)
    assert whole.pipeline is None
    assert staged.time.waiting == staged.pipeline.bubble > 0
    assert staged.time.least == pytest.approx(staged.time.computing / (1 - staged.pipeline.bubble))
    # Two stages of two blocks, in four micro-batches of one row: each calls half of the operations four times.
    calls = sum(whole.calls[phase] for phase in ("forward", "backward"))
    for rank in staged.pipeline.ranks:
        assert sum(rank.calls[phase] for phase in ("forward", "backward")) == pytest.approx(2 * calls, rel=0.35)


def test_cards_are_names_or_files(tmp_path):
    file = tmp_path / "card.json"
    wanted = dataclasses.replace(PLAIN, links={"tp": Link(rate=5.0, latency=1.0)})
    file.write_text(json.dumps(dataclasses.asdict(wanted)))
    assert Card.of(str(file)) == wanted
    file.write_text('{"name": "none"}')
    for text in (str(file), "h300"):
        with pytest.raises(ConfigError, match=r"is no card: .*Known are h200; .*shardcore calibrate FILE"):
            Card.of(text)
    with pytest.raises(ConfigError, match=r"Workload.card is NVIDIA H200, a cuda, and device is 'cpu'"):
        Workload(device="cpu", card=Card.of("h200"))


def test_commands(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    pytest.importorskip("shard_llama")
    monkeypatch.setattr(calibrating, "_ENOUGH", 0.0)
    monkeypatch.setattr(calibrating, "_SIZES", {"cpu": (64, 2**16)})
    file, run = str(tmp_path / "card.json"), CliRunner().invoke
    made = run(main, ["calibrate", file, "--device", "cpu"])
    assert made.exit_code == 0, made.output
    card = Card.of(file)
    assert all(rate > 0 for rate in (*card.products.values(), card.memory, card.call))
    asked = ["plan", "LlamaForCausalLM", "--tp", "2", "--seq", "16", "--dtype", "fp32", "--card", file]
    told = run(main, asked).output
    assert "a step takes" in told
    assert "(not counted: --link for tp)" in told
    data = json.loads(run(main, [*asked, "--link", "tp=1GB", "--json"]).output)
    assert data["workload"]["card"] == card.name
    assert data["workload"]["device"] == "cpu"
    assert 0 < data["time"]["least"] < data["time"]["most"]
    for more, says in [
        (["--link", "xy=1GB"], "there is no axis 'xy', only"),
        (["--link", "1"], "is no amount of memory"),
        (["--device", "cuda"], "and device is 'cuda'"),
    ]:
        refused = run(main, [*asked, *more])
        assert refused.exit_code
        assert says in refused.output
    assert "together with --card" in run(main, ["plan", "LlamaForCausalLM", "--link", "1GB"]).output


def test_a_search_with_a_card_lists_what_is_fastest_first(capsys):
    def made(tp, sent, card):
        workload = Workload(device="cpu", card=card)
        traffic = Traffic(phase="forward", operation="send", axis="tp", ranks=2, count=0, bytes=sent)
        calls = {"forward": 1000 // tp}
        return alone(
            Estimate(
                config=ShardConfig(tensor_parallel_size=tp), workload=workload, held={}, kept=0, peak=1,
                peak_phase="forward", at_peak=Counter(), traffic=(traffic,), operations={}, calls=calls, device={},
            )
        )  # fmt: skip

    linked = dataclasses.replace(PLAIN, links={"tp": Link(rate=1e9, latency=0.0)})
    for card, first, costs in ((linked, 4, "time"), (PLAIN, 1, "sent")):
        found = [made(tp, sent, card) for tp, sent in ((1, 0), (2, 10**8), (4, 2 * 10**8))]
        best = ordered(found, None)
        assert best[0].sizes.tp == first
        show_search("model", best, None)
        assert f"{costs} for a sample" in capsys.readouterr().out
