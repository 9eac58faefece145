"""Models of other kinds, and those of one's own, by the Trainer."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardcore

pytest.importorskip("accelerate", reason="the Trainer of transformers needs accelerate")

sys.path.insert(0, str(Path(__file__).parent / "support"))

from stacks import by_night  # from support/
from trainings_by_clients import (
    Rows,
    arguments,
    both,
    case_of,
    llama,
    of_case,
    parameters,
    same,
    words,
)  # from support/

TP2 = {"tp": 2}
DP2 = {"tp": 1, "dp": 2}
TP2DP2 = {"tp": 2, "dp": 2}


pytestmark = pytest.mark.usefixtures("float64_throughout")


def bert() -> Any:
    return case_of("bert", "masked_lm").build().double()


def declared() -> Any:
    model = bert()
    # So that the Trainer divides the losses of accumulated batches by their number.
    model.accepts_loss_kwargs = False
    return model


def classifier() -> Any:
    return case_of("bert", "token_classification").build().double()


def vit() -> Any:
    return case_of("vit", "image_classification").build().double()


@pytest.mark.parametrize("mesh", by_night([TP2, DP2, TP2DP2], but=[TP2]), ids=str)
@pytest.mark.parametrize(
    ("family", "name", "build"),
    [
        ("bert", "masked_lm", declared),
        ("vit", "image_classification", vit),
        pytest.param("bert", "masked_lm", bert, marks=pytest.mark.nightly),
        pytest.param("bert", "token_classification", classifier, marks=pytest.mark.nightly),
    ],
)
def test_other_families(pool, tmp_path, family, name, build, mesh):
    """Also those that average over the labels of a call, of which replicas have other numbers."""
    rows = of_case(family, name, build())
    settings = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.0}
    wanted, *found = both(pool, tmp_path, mesh, settings, build=build, train=rows)
    for got in found:
        same(got, wanted)


def without_labels() -> Rows:
    """Of any two rows of a batch, one has no labels."""
    rows = of_case("bert", "masked_lm", bert())
    rows.columns["labels"][::2] = -100
    rows.columns["labels"][1::2] = rows.columns["input_ids"][1::2]
    return rows


def in_order(folder: str, mesh: dict[str, Any] | None) -> dict[str, Any]:
    """Train and evaluate on rows in their order, on batches of two."""
    from shardcore_trainer import Trainer

    class InOrder(Trainer):
        def _get_train_sampler(self, *args: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    model = shardcore.shard(bert(), **mesh) if mesh else bert()
    size = 2 // (mesh or {}).get("dp", 1)
    args = arguments(
        folder,
        per_device_train_batch_size=size,
        per_device_eval_batch_size=2 * size,
        optim="sgd",
        optim_args=None,
        logging_nan_inf_filter=False,
    )
    rows = without_labels()
    trainer = InOrder(model=model, args=args, train_dataset=rows)
    trainer.train()
    few = Rows({name: column[:5] for name, column in of_case("bert", "masked_lm", bert()).columns.items()})
    metrics = trainer.evaluate(few)
    return {
        "history": trainer.state.log_history,
        "steps": trainer.state.global_step,
        "parameters": parameters(model),
        "eval_loss": metrics["eval_loss"],
    }


@pytest.mark.parametrize("mesh", [DP2, TP2DP2], ids=str)
def test_a_replica_without_labels_and_evaluation(pool, tmp_path, mesh):
    (wanted,) = pool.run(in_order, str(tmp_path), None, world=1)
    assert all(value.isfinite().all() for value in wanted["parameters"].values())
    for got in pool.run(in_order, str(tmp_path), mesh, world=mesh["tp"] * mesh["dp"]):
        same(got, wanted)
        assert got["eval_loss"] == pytest.approx(wanted["eval_loss"], rel=1e-6)


# Generation


def speaks(folder: str, mesh: dict[str, Any] | None) -> dict[str, Any]:
    from shardcore_trainer import Seq2SeqTrainer

    case = case_of("whisper", "speech_to_text")
    model = case.build().double()
    rows = of_case("whisper", "speech_to_text", model, count=4)
    settings = {"predict_with_generate": True, "generation_max_length": 7, "per_device_eval_batch_size": 2}
    if mesh:
        model = shardcore.shard(model, **mesh)
        parts = mesh.get("dp", 1)
        settings |= {"per_device_train_batch_size": 4 // parts, "per_device_eval_batch_size": 2 // parts}
    args = arguments(folder, "Seq2SeqTrainingArguments", **settings)
    trainer = Seq2SeqTrainer(model=model, args=args, train_dataset=rows)
    trainer.train()
    found = trainer.predict(Rows({name: column[:5] for name, column in rows.columns.items()}))
    return {"history": trainer.state.log_history, "tokens": found.predictions, "parameters": parameters(model)}


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", [TP2, TP2DP2], ids=str)
def test_speech_is_predicted_by_generating(pool, tmp_path, mesh):
    (wanted,) = pool.run(speaks, str(tmp_path), None, world=1)
    for got in pool.run(speaks, str(tmp_path), mesh, world=mesh["tp"] * mesh.get("dp", 1)):
        assert got["tokens"].tolist() == wanted["tokens"].tolist()
        for name, parameter in wanted["parameters"].items():
            torch.testing.assert_close(got["parameters"][name], parameter, rtol=1e-9, atol=1e-9)


# A model of one's own


class Own(torch.nn.Module):
    """A sharded body, and a head that is not."""

    def __init__(self, body: torch.nn.Module) -> None:
        super().__init__()
        self.body = body
        torch.manual_seed(1 + dist.get_rank())
        self.head = torch.nn.Linear(32, 3).double()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.body(input_ids=input_ids).last_hidden_state[:, -1])
        return {"loss": torch.nn.functional.cross_entropy(logits, labels[:, -1] % 3), "logits": logits}


def own(folder: str, mesh: dict[str, Any] | None) -> dict[str, torch.Tensor]:
    from shardcore_trainer import Trainer

    body = llama().model
    model = Own(shardcore.shard(body, **mesh) if mesh else body)
    settings = {"optim": "sgd", "optim_args": None, "learning_rate": 0.1, "gradient_accumulation_steps": 2}
    parts = (mesh or {}).get("dp", 1)
    args = arguments(folder, max_grad_norm=0.1, per_device_train_batch_size=4 // parts, **settings)
    trainer = Trainer(model=model, args=args, train_dataset=words(20))
    trainer.train()
    trainer.save_model(f"{folder}/saved")
    return parameters(model)


@pytest.mark.parametrize("mesh", [TP2, TP2DP2], ids=str)
def test_a_sharded_body_with_a_head_that_is_not(pool, tmp_path, mesh):
    from safetensors.torch import load_file

    (wanted,) = pool.run(own, str(tmp_path / "one"), None, world=1)
    for got in pool.run(own, str(tmp_path / "more"), mesh, world=mesh["tp"] * mesh.get("dp", 1)):
        for name, parameter in wanted.items():
            torch.testing.assert_close(got[name], parameter, rtol=1e-9, atol=1e-9)
    saved = load_file(tmp_path / "more" / "saved" / "model.safetensors")
    for name, parameter in wanted.items():
        torch.testing.assert_close(saved[name], parameter, rtol=1e-9, atol=1e-9)


def a_head_of_transformers(folder: str) -> dict[str, torch.Tensor]:
    from shardcore_trainer import Trainer

    model = llama()
    model.model = shardcore.shard(model.model, tp=2)
    args = arguments(folder, save_strategy="steps", save_steps=1, max_steps=1, save_only_model=True)
    Trainer(model=model, args=args, train_dataset=words(4)).train()
    return parameters(model)


@pytest.mark.skipif(
    version("transformers")[0] == "4",
    reason="one call of torch's fused AdamW gets plain tensors and DTensors there, an error",
)
def test_the_model_of_transformers_around_a_sharded_body_is_saved_whole(pool, tmp_path):
    from transformers import LlamaForCausalLM

    wanted, _ = pool.run(a_head_of_transformers, str(tmp_path), world=2)
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-1", dtype=torch.float64)
    assert all(torch.equal(parameter, wanted[name]) for name, parameter in saved.named_parameters())


def keeps(folder: str) -> None:
    from shardcore_trainer import Trainer

    model = Own(shardcore.shard(llama().model, tp=2))
    Trainer(model=model, args=arguments(folder, save_strategy="steps"), train_dataset=words(20))


def test_a_head_that_no_checkpoint_would_have_is_refused_before_the_first_step(pool, tmp_path):
    with pytest.raises(Exception, match=r"head\.weight, head\.bias lie beside the sharded LlamaModel"):
        pool.run(keeps, str(tmp_path), world=2)


def from_scratch(folder: str, mesh: dict[str, Any] | None) -> dict[str, Any]:
    from shardcore_trainer import Trainer

    args = arguments(folder, per_device_train_batch_size=2 if mesh else 4)

    def make() -> Any:
        return shardcore.shard(llama(), **mesh) if mesh else llama()

    trainer = Trainer(model_init=make, args=args, train_dataset=words(20))
    trainer.train()
    return parameters(trainer.model)


def test_a_model_that_the_trainer_makes_itself(pool, tmp_path):
    (wanted,) = pool.run(from_scratch, str(tmp_path), None, world=1)
    for got in pool.run(from_scratch, str(tmp_path), TP2DP2, world=4):
        for name, parameter in wanted.items():
            torch.testing.assert_close(got[name], parameter, rtol=1e-9, atol=1e-9)
