"""What the doctor says of cards, which are stand-ins here, and of ranks that cannot talk."""

from __future__ import annotations

import json
import sys
import time
import types

import pytest
import torch
from click.testing import CliRunner

from shardcore_cli import doctor, main


def checks(*options):
    done = CliRunner().invoke(main, ["doctor", "--json", *options])
    found = json.loads(done.stdout)["checks"]
    return done.exit_code, {check["what"]: (check["state"], check["why"]) for check in found}


@pytest.fixture
def machine(monkeypatch):
    """Have cards of the given capabilities, NCCL, triton, and distributions with their versions."""

    def have(*capabilities, **distributions):
        cards = [types.SimpleNamespace(name="Card", total_memory=80 * 2**30, major=a, minor=b) for a, b in capabilities]
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(cards))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
        monkeypatch.setattr(torch.cuda, "get_device_properties", cards.__getitem__)
        monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 1))
        monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
        monkeypatch.setattr(doctor, "installed", lambda name: distributions.get(name.replace("-", "_")))
        monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(__version__="3.5"))
        monkeypatch.setattr(doctor, "try_all_reduce", lambda cards: ("works", f"{cards} ranks"))

    return have


def test_what_cards_have_is_said(machine):
    machine((9, 0), (9, 0), flash_attn="2.8", flash_attn_3="3.0", flash_attn_4="4.0")
    _, found = checks()
    assert found["CUDA devices"] == ("works", "2 Card (80 GiB)")
    assert found["nccl"] == ("works", "tensor parallelism on NVIDIA GPUs, version (2, 30, 1)")
    assert found["torch.compile on cards"] == ("works", "triton 3.5, compute capability 9.0")
    assert found["fp8"] == ("works", "compute capability 9.0; 8.9 or more is needed")
    assert found["an all-reduce"] == ("works", "2 ranks")
    for name, version in (("flash-attn", "2.8"), ("flash-attn-3", "3.0"), ("flash-attn-4", "4.0")):
        assert found[name] == ("works", f"{version}, compute capability 9.0")


def test_the_oldest_card_decides(machine):
    machine((9, 0), (8, 0), flash_attn="2.8", flash_attn_3="3.0")
    _, found = checks()
    lost = "; sdpa and eager attention work"
    assert found["flash-attn"] == ("works", "2.8, compute capability 8.0")
    assert found["flash-attn-3"] == ("missing", f"3.0, compute capability 8.0{lost}")
    assert found["flash-attn-4"] == ("missing", f"not installed, compute capability 8.0{lost}")
    assert found["fp8"][0] == "missing"


def test_without_cards_each_finding_says_so(machine, monkeypatch):
    machine(flash_attn="2.8")
    monkeypatch.setitem(sys.modules, "triton", None)
    status, found = checks("--quick")
    for name in ("flash-attn", "flash-attn-3", "flash-attn-4", "torch.compile on cards", "fp8"):
        assert found[name][0] == "missing"
        assert "needs a CUDA device" in found[name][1]
    assert found["CUDA devices"] == ("missing", "0")
    assert "an all-reduce" not in found
    assert status == 0


def test_cards_are_those_that_shardcore_takes_flash_attention_for():
    attention = pytest.importorskip("shardcore_transformers._attention")
    names = {
        "flash_attention_2": "flash-attn",
        "flash_attention_3": "flash-attn-3",
        "flash_attention_4": "flash-attn-4",
    }
    assert {names[name]: cards for name, cards in attention._CARDS.items()} == doctor._FLASH


def _hang(rank, *_):
    import signal

    signal.alarm(1)
    time.sleep(60)


def _fail(rank, *_):
    raise ValueError("no network\nat all")


@pytest.mark.nightly
@pytest.mark.ranks
@pytest.mark.parametrize(("what", "said"), [(_fail, "at all"), (_hang, "terminated with signal SIGALRM")])
def test_ranks_that_cannot_talk_are_a_finding(monkeypatch, what, said):
    monkeypatch.setattr(doctor, "_add", what)
    status, found = checks()
    assert status == 1
    assert found["an all-reduce"][0] == "fails"
    assert found["an all-reduce"][1].startswith("gloo, ranks: 2, limit: 60 s; ")
    assert found["an all-reduce"][1].endswith(said)
