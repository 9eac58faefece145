"""sentence-transformers on sharded models: the same embeddings and trainings, saved for sentence-transformers alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")

# The workers of the pool inherit the path.
sys.path.insert(0, str(Path(__file__).parent / "support"))

from embeddings import encoded, refused, trained  # from support/

MESHES = [({"tp": 2}, 2), ({"tp": 2, "dp": 2}, 4)]


@pytest.mark.parametrize(("mesh", "world"), MESHES, ids=["tp2", "tp2dp2"])
def test_encodes_and_saves(pool, tmp_path, mesh, world):
    (wanted,) = pool.run(encoded, str(tmp_path / "one"), None, world=1)
    assert float(wanted["embeddings"].std()) > 1e-2
    for got in pool.run(encoded, str(tmp_path / "more"), mesh, world=world):
        torch.testing.assert_close(got["embeddings"], wanted["embeddings"], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(got["reloaded"], wanted["embeddings"], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("mesh", "world"), MESHES, ids=["tp2", "tp2dp2"])
def test_trains_as_unsharded(pool, tmp_path, mesh, world):
    (wanted,) = pool.run(trained, str(tmp_path / "one"), None, world=1)
    rows = 4 * 2 // world
    options = {"per_device_train_batch_size": rows, "per_device_eval_batch_size": rows}
    for got in pool.run(trained, str(tmp_path / "more"), mesh, world=world, **options):
        assert len(got["history"]) == len(wanted["history"])
        for mine, other in zip(got["history"], wanted["history"], strict=True):
            for name in other.keys() & {"loss", "grad_norm", "eval_loss"}:
                assert mine[name] == pytest.approx(other[name], rel=1e-6), name
        for name, parameter in wanted["parameters"].items():
            torch.testing.assert_close(got["parameters"][name], parameter, rtol=1e-9, atol=1e-9)


def test_a_whole_pipeline_is_refused_and_says_what_to_shard(pool, tmp_path):
    for message in pool.run(refused, str(tmp_path), world=2):
        assert "shardcore.shard(model[0].auto_model" in message
