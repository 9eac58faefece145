"""Saving a sharded model needs room for one file on the rank that writes, and for hardly anything on the others."""

from __future__ import annotations

import os

import pytest
from llama_cases import build, shard
from resident import Peak
from saving_files import DP2, ODD, TP2, saved

from shardcore_testing.parity import whole

pytestmark = pytest.mark.newest

_MB = 1_000_000
_LARGE = {
    **ODD,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "vocab_size": 4001,
}
_LARGEST, _FILE, _SLACK = 4001 * 512 * 4, 16 * _MB, 3 * _MB


@pytest.mark.nightly
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux to measure peaks")
@pytest.mark.parametrize(("axes", "tied"), [(TP2, False), (DP2, True)], ids=["tp2", "dp2-tied"])
def test_memory(pool, tmp_path, axes, tied):
    writer, other = pool.run(_memory, str(tmp_path), axes, tied)
    assert writer["model"] > 64 * _MB
    assert writer["save"] < _FILE + _LARGEST + _SLACK
    assert other["save"] < _LARGEST + _SLACK
    # The measure sees what the usual way would cost.
    assert writer["gather all"] > 60 * _MB > _FILE + _LARGEST + _SLACK
    assert other["gather all"] > 60 * _MB


def _memory(folder: str, axes: dict[str, int], tied: bool) -> dict[str, int]:
    shard(build(**ODD), **axes).save_pretrained(f"{folder}/warm-up", max_shard_size=60_000)
    model = shard(build(**_LARGE, tie_word_embeddings=tied), **axes)
    grown = {"model": sum(p.numel() * p.element_size() for p in model.parameters())}
    with Peak() as peak:
        model.save_pretrained(f"{folder}/large", max_shard_size=_FILE)
    grown["save"] = peak.bytes
    with Peak() as peak:
        everything = [whole(parameter) for parameter in model.parameters()]
    grown["gather all"] = peak.bytes
    assert len(everything) == len(saved(f"{folder}/large"))
    return grown
