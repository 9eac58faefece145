"""A rank that uses a client of a sharded model alone gets an error in seconds, which names what it is in."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import shardcore

pytest.importorskip("accelerate", reason="the Trainer of transformers needs accelerate")
pytest.importorskip("peft")

sys.path.insert(0, str(Path(__file__).parent / "support"))

from adapters import adapted, lora  # from support/
from trainings_by_clients import arguments, llama, words

pytestmark = pytest.mark.usefixtures("float64_throughout")


def trainer(folder: str) -> Any:
    from shardcore_trainer import Trainer

    return Trainer(model=shardcore.shard(llama(), tp=2), args=arguments(folder), train_dataset=words(20))


def evaluation(folder: str) -> Callable[[], Any]:
    made = trainer(folder)
    return lambda: made.evaluate(words(20))


def prediction(folder: str) -> Callable[[], Any]:
    made = trainer(folder)
    return lambda: made.predict(words(20))


def training(folder: str) -> Callable[[], Any]:
    return trainer(folder).train


def whole_state(folder: str) -> Callable[[], Any]:
    from shardcore_trainer.accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(shardcore.shard(llama(), tp=2))
    return lambda: accelerator.get_state_dict(model)


def merge(folder: str) -> Callable[[], Any]:
    return shardcore.shard(adapted(llama(), lora()), tp=2).merge_adapter


def alone(folder: str, make: Callable[[str], Callable[[], Any]]) -> str:
    call = make(folder)
    if dist.get_rank() == 1:
        dist.barrier()
        return ""
    with pytest.raises(shardcore.MissingRanksError) as caught:
        call()
    dist.barrier()
    return str(caught.value)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (evaluation, "Trainer.evaluate"),
        (prediction, "Trainer.predict"),
        (training, "Trainer.train"),
        (whole_state, "Accelerator.get_state_dict"),
        (merge, "a merge of adapters"),
    ],
)
def test_against_one_that_waits_in_a_barrier(pool, tmp_path, make, name):
    said, _ = pool.run(alone, str(tmp_path), make, world=2, timeout=60)
    assert f"rank 0 is in {name} with a " in said
    assert "rank 1 waits for this one in torch.distributed.barrier" in said


def evaluates_while_the_other_one_trains(folder: str) -> None:
    made = trainer(folder)
    made.evaluate(words(20)) if dist.get_rank() == 0 else made.train()


@pytest.mark.nightly
def test_two_calls_of_a_trainer_do_not_meet(pool, tmp_path):
    with pytest.raises(Exception, match="others will not come") as caught:
        pool.run(evaluates_while_the_other_one_trains, str(tmp_path), world=2, timeout=60)
    assert [failure.error for failure in caught.value.failures] == ["MissingRanksError"] * 2
