"""What a Trainer cannot do with a sharded model is refused before the first step."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import shardcore

pytest.importorskip("accelerate", reason="the Trainer of transformers needs accelerate")

sys.path.insert(0, str(Path(__file__).parent / "support"))

from trainings_by_clients import arguments, llama, words  # from support/

pytestmark = pytest.mark.usefixtures("float64_throughout")


def plain(folder: str, kind: str) -> None:
    import transformers

    model = shardcore.shard(llama(), tp=2)
    getattr(transformers, kind)(model=model, args=arguments(folder), train_dataset=words(20))


@pytest.mark.parametrize("kind", ["Trainer", "Seq2SeqTrainer"])
def test_a_trainer_that_knows_no_sharded_models_is_refused_by_all_ranks(pool, tmp_path, kind):
    with pytest.raises(Exception, match=r"from shardcore\.integrations\.trainer import Trainer") as caught:
        pool.run(plain, str(tmp_path), kind, world=2)
    assert [failure.rank for failure in caught.value.failures] == [0, 1] or len(caught.value.failures) == 2


def adafactor(folder: str) -> None:
    from shardcore.integrations.trainer import Trainer

    args = arguments(folder, optim="adafactor", optim_args=None)
    Trainer(model=shardcore.shard(llama(), tp=2), args=args, train_dataset=words(20)).train()


def test_an_optimizer_that_knows_no_dtensors_is_refused_before_its_first_step(pool, tmp_path):
    with pytest.raises(Exception, match=r"Adafactor uses operations that the parameters of a sharded model lack"):
        pool.run(adafactor, str(tmp_path), world=2)


def in_a_pipeline(folder: str) -> None:
    from shardcore.integrations.trainer import Trainer

    Trainer(model=shardcore.shard(llama(), pp=2), args=arguments(folder), train_dataset=words(20))


def test_pipelines_are_refused(pool, tmp_path):
    with pytest.raises(Exception, match="divided among the ranks of a pipeline"):
        pool.run(in_a_pipeline, str(tmp_path), world=2)
