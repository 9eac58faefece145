"""sentence-transformers on sharded models: the same embeddings and trainings, saved for sentence-transformers alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")

# The workers of the pool inherit the path.
sys.path.insert(0, str(Path(__file__).parent / "support"))

from embeddings import (  # from support/
    checkpointed,
    crossed,
    encoded,
    refused,
    trained,
    trained_across,
    words_of,
    words_of_native,
    words_of_unlike,
)

OF_TORCH = pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional.all_gather is depr:FutureWarning")

MESHES = [({"tp": 2}, 2), ({"tp": 2, "dp": 2}, 4)]


@pytest.mark.parametrize(("mesh", "world"), MESHES, ids=["tp2", "tp2dp2"])
def test_encodes_and_saves(pool, tmp_path, mesh, world):
    (wanted,) = pool.run(encoded, str(tmp_path / "one"), None, world=1)
    assert float(wanted["embeddings"].std()) > 1e-2
    for got in pool.run(encoded, str(tmp_path / "more"), mesh, world=world):
        torch.testing.assert_close(got["embeddings"], wanted["embeddings"], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(got["reloaded"], wanted["embeddings"], rtol=1e-9, atol=1e-9)


#: (loss, mesh): a loss of rows with other rows of the batch sees that of one replica.
TRAININGS = [
    ("scores", {"tp": 2}),
    ("scores", {"tp": 2, "dp": 2}),
    pytest.param("ranking", {"tp": 2}, marks=pytest.mark.nightly),
    ("cached", {"tp": 2}),
    ("gathered", {"tp": 1, "dp": 2}),
    pytest.param("classes", {"tp": 2}, marks=pytest.mark.nightly),
    ("classes", {"tp": 2, "dp": 2}),
]
METRICS = {"loss", "grad_norm", "eval_loss", "eval_pairs_spearman_cosine", "eval_alike_cosine_ap"}


def same_history(got, wanted):
    assert len(got["history"]) == len(wanted["history"])
    for mine, other in zip(got["history"], wanted["history"], strict=True):
        assert mine.keys() == other.keys()
        for name in other.keys() & METRICS:
            assert mine[name] == pytest.approx(other[name], rel=1e-6), name


def same_parameters(got, wanted):
    assert got.keys() == wanted.keys()
    for name, parameter in wanted.items():
        torch.testing.assert_close(got[name], parameter, rtol=1e-9, atol=1e-9, msg=name)


@OF_TORCH
@pytest.mark.parametrize(("loss", "mesh"), TRAININGS, ids=str)
def test_trains_as_unsharded(pool, tmp_path, loss, mesh):
    alone = "ranking" if loss in ("cached", "gathered") else loss
    (wanted,) = pool.run(trained, str(tmp_path / "one"), None, alone, world=1)
    replicas = mesh.get("dp", 1)
    options = {f"per_device_{what}_batch_size": 4 // replicas for what in ("train", "eval")}
    for got in pool.run(trained, str(tmp_path / "more"), mesh, loss, world=mesh["tp"] * replicas, **options):
        same_history(got, wanted)
        same_parameters(got["parameters"], wanted["parameters"])


@pytest.mark.nightly
@pytest.mark.parametrize("options", [{}, {"save_only_model": True}], ids=["all", "model"])
def test_checkpoints(pool, tmp_path, options):
    (wanted,) = pool.run(checkpointed, str(tmp_path / "one"), None, world=1, **options)
    assert len({value["shown"] for value in wanted["saved"].values()}) == 2  # the card has numbers of its model
    same_parameters(wanted["parameters"], wanted["saved"][2]["parameters"])  # the best ones
    for got in pool.run(checkpointed, str(tmp_path / "two"), {"tp": 2}, world=2, **options):
        same_history(got, wanted)
        same_parameters(got["parameters"], wanted["parameters"])
        assert got["best"] == wanted["best"] == "checkpoint-2"  # not what it ended with
        for step, saved in wanted["saved"].items():
            same_parameters(got["saved"][step]["parameters"], saved["parameters"])
            assert got["saved"][step]["shown"] == saved["shown"]
        if "resumed" in wanted:
            same_parameters(got["resumed"], wanted["resumed"])


def test_a_cross_encoder_trains_as_unsharded(pool, tmp_path):
    (wanted,) = pool.run(trained_across, str(tmp_path / "one"), None, world=1)
    assert float(wanted["predicted"].std()) > 1e-6
    for got in pool.run(trained_across, str(tmp_path / "two"), {"tp": 2}, world=2):
        same_history(got, wanted)
        same_parameters(got["parameters"], wanted["parameters"])
        torch.testing.assert_close(got["predicted"], wanted["predicted"], rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated:FutureWarning")
def test_the_own_trainer_fails_before_the_first_step(pool, tmp_path):
    for message in pool.run(words_of_native, str(tmp_path), {"tp": 2}, world=2):
        assert any(words in message for words in ("DTensor", "sharded tensor", "sharding strategy"))


def test_an_evaluator_that_goes_by_a_set_says_what_differs(pool, tmp_path):
    for message in pool.run(words_of_unlike, str(tmp_path), {"tp": 2}, world=2):
        assert "PYTHONHASHSEED" in message


def test_a_whole_pipeline_is_refused_and_says_what_to_shard(pool, tmp_path):
    for message in pool.run(refused, str(tmp_path), world=2):
        assert "shardcore.shard(model[0].auto_model" in message
        assert "sharded(SentenceTransformerTrainer)" in message
    for message in pool.run(refused, str(tmp_path), crossed, world=2):
        assert "which predicts, trains (shardcore_trainer.sharded(CrossEncoderTrainer))" in message


#: (loss, mesh, rows to evaluate, words)
REFUSED = {
    "gathered": ({"tp": 2}, 8, "each sentence would be a wrong answer to itself"),
    "both gathered": ({"tp": 2, "dp": 2}, 8, "CachedMultipleNegativesRankingLoss"),
    "gathered, unfilled": ({"tp": 1, "dp": 2}, 5, "divides their number"),
}


@OF_TORCH
@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_that_gathers_over_ranks_is_refused(pool, tmp_path, name):
    mesh, evaluated, words = REFUSED[name]
    world = mesh["tp"] * mesh.get("dp", 1)
    loss = name.partition(",")[0]
    for message in pool.run(words_of, str(tmp_path), mesh, loss, evaluated, world=world):
        assert words in message


def test_checkpoints_without_the_state_of_a_loss_are_refused(pool, tmp_path):
    for message in pool.run(words_of, str(tmp_path), {"tp": 2}, "classes", 8, world=2, save_strategy="steps"):
        assert "classifier.weight, classifier.bias of the loss lie beside" in message
