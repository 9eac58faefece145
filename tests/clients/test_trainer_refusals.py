"""What a Trainer cannot do with a sharded model is refused before the first step."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import shardcore
from shardcore import NotSupportedError, StaleOptimizerWarning

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
    with pytest.raises(Exception, match=r"from shardcore_trainer import Trainer") as caught:
        pool.run(plain, str(tmp_path), kind, world=2)
    assert [failure.rank for failure in caught.value.failures] == [0, 1] or len(caught.value.failures) == 2


def adafactor(folder: str) -> None:
    from shardcore_trainer import Trainer

    args = arguments(folder, optim="adafactor", optim_args=None)
    Trainer(model=shardcore.shard(llama(), tp=2), args=args, train_dataset=words(20)).train()


def test_an_optimizer_that_knows_no_dtensors_is_refused_before_its_first_step(pool, tmp_path):
    with pytest.raises(Exception, match=r"Adafactor uses operations that the parameters of a sharded model lack"):
        pool.run(adafactor, str(tmp_path), world=2)


def watched(folder: str) -> None:
    import transformers

    from shardcore_trainer import Trainer

    callback = type("WandbCallback", (transformers.TrainerCallback,), {})  # of what is not installed here
    trainer = Trainer(
        model=shardcore.shard(llama(), tp=2),
        args=arguments(folder, max_steps=1),
        train_dataset=words(20),
        callbacks=[callback()],
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_WATCH", "gradients")
        with pytest.raises(NotSupportedError, match=r"WANDB_WATCH=gradients lets wandb look.*Gradients in a log"):
            trainer.train()
        patch.setenv("WANDB_WATCH", "false")
        trainer.train()


def test_gradients_are_not_watched_on_one_rank(pool, tmp_path):
    pool.run(watched, str(tmp_path), world=2)


def in_a_pipeline(folder: str) -> None:
    from shardcore_trainer import Trainer

    Trainer(model=shardcore.shard(llama(), pp=2), args=arguments(folder), train_dataset=words(20))


def test_pipelines_are_refused(pool, tmp_path):
    with pytest.raises(Exception, match="divided among the ranks of a pipeline"):
        pool.run(in_a_pipeline, str(tmp_path), world=2)


def sharded_too_late(folder: str) -> None:
    from shardcore_trainer import Trainer

    model = llama()
    trainer = Trainer(model=model, args=arguments(folder), train_dataset=words(20))
    shardcore.shard(model, tp=2)
    trainer.train()


def shards_twice(folder: str) -> None:
    from shardcore_trainer import Trainer

    Trainer(model=shardcore.shard(llama(), tp=2), args=arguments(folder, fsdp="full_shard"), train_dataset=words(20))


def steps_what_was(folder: str) -> None:
    from shardcore_trainer import Trainer

    model = llama()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.warns(StaleOptimizerWarning):
        shardcore.shard(model, tp=2)
    Trainer(model=model, args=arguments(folder), train_dataset=words(20), optimizers=(optimizer, None)).train()


def shards_what_is_wrapped(folder: str) -> None:
    model = torch.nn.parallel.DistributedDataParallel(llama())
    shardcore.shard(model, tp=2)


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (sharded_too_late, "Shard the model first, and give the sharded one to the Trainer"),
        (shards_twice, "TrainingArguments have fsdp=.*cannot be sharded twice"),
        (steps_what_was, r"was made before shard\(\) .*first: model.embed_tokens.weight.*would change nothing"),
        (shards_what_is_wrapped, "is inside of a DistributedDataParallel"),
    ],
)
def test_the_wrong_order_is_refused_by_all_ranks(pool, tmp_path, mistake, said):
    with pytest.raises(Exception, match=said) as caught:
        pool.run(mistake, str(tmp_path), world=2)
    assert {failure.error for failure in caught.value.failures} == {"ConfigError"}
    assert len(caught.value.failures) == 2
