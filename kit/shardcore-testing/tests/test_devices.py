"""Which device a rank of the pool takes; what runs on cards is ``nox -s gpu``."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from shardcore_cli.app import main
from shardcore_testing import _worker


@pytest.fixture
def cards(monkeypatch):
    """Let there be so many cards as the returned list is made to have, and note which was taken."""
    found, taken = [], []
    module = SimpleNamespace(device_count=lambda: len(found), set_device=taken.append)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    monkeypatch.setattr(_worker, "accelerator", lambda: "cuda" if found else None)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return found, taken


def test_a_rank_for_each_card_needs_nothing(cards):
    found, taken = cards
    found += ["a", "b"]
    ready = _worker.take_device("cuda", rank=1, ranks=2, port=7)
    assert (ready.port, ready.note, ready.complaint, taken) == (7, "", "", [1])
    assert "NCCL_HOSTID" not in os.environ


def test_ranks_that_share_a_card_are_on_hosts_of_their_own(cards):
    found, taken = cards
    found += ["a", "b"]
    ready = _worker.take_device("cuda", rank=3, ranks=4)
    assert taken == [1]
    assert ready.note == "4 ranks share 2 cuda device(s), and talk over sockets"
    assert os.environ["NCCL_HOSTID"] == "rank-3"
    assert os.environ["NCCL_NET"] == "Socket"


def test_without_a_card_there_is_a_complaint(cards):
    ready = _worker.take_device("cuda", rank=0, ranks=2)
    assert "there is no cuda device here" in ready.complaint
    assert _worker.take_device("cpu", rank=0, ranks=2).complaint == ""


def test_the_command_refuses_a_device_that_is_not_here():
    result = CliRunner().invoke(main, ["verify", "torch", "--device", "tpu"])
    assert result.exit_code == 1
    assert "--device tpu is not here; this machine has cpu" in result.output
