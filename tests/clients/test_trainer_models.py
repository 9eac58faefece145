"""Models of other kinds, and those of one's own, by the Trainer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardcore

pytest.importorskip("accelerate", reason="the Trainer of transformers needs accelerate")

sys.path.insert(0, str(Path(__file__).parent / "support"))

from trainings_by_clients import arguments, both, case_of, llama, of_case, parameters, same, words  # from support/

TP2 = {"tp": 2}
TP2DP2 = {"tp": 2, "dp": 2}


pytestmark = pytest.mark.usefixtures("float64_throughout")


def bert() -> Any:
    model = case_of("bert", "masked_lm").build().double()
    # It does not divide its loss by the labels of the whole step, as the Trainer believes of whoever takes **kwargs.
    model.accepts_loss_kwargs = False
    return model


def vit() -> Any:
    return case_of("vit", "image_classification").build().double()


@pytest.mark.parametrize("mesh", [TP2, TP2DP2], ids=str)
@pytest.mark.parametrize(
    ("family", "name", "build"), [("bert", "masked_lm", bert), ("vit", "image_classification", vit)]
)
def test_other_families(pool, tmp_path, family, name, build, mesh):
    if family == "bert" and mesh == TP2DP2:
        pytest.skip("an average of the averages of replicas, whose rows have other numbers of labels")
    rows = of_case(family, name, build())
    wanted, *found = both(pool, tmp_path, mesh, {}, build=build, train=rows)
    for got in found:
        same(got, wanted)


# Generation


def speaks(folder: str, mesh: dict[str, Any] | None) -> dict[str, Any]:
    from shardcore.integrations.trainer import Seq2SeqTrainer

    case = case_of("whisper", "speech_to_text")
    model = case.build().double()
    rows = of_case("whisper", "speech_to_text", model, count=3)
    settings = {"predict_with_generate": True, "generation_max_length": 7, "per_device_eval_batch_size": 2}
    if mesh:
        model = shardcore.shard(model, **mesh)
        parts = mesh.get("dp", 1)
        settings |= {"per_device_train_batch_size": 4 // parts, "per_device_eval_batch_size": 2 // parts}
    args = arguments(folder, "Seq2SeqTrainingArguments", **settings)
    trainer = Seq2SeqTrainer(model=model, args=args, train_dataset=rows)
    trainer.train()
    found = trainer.predict(rows)
    return {"history": trainer.state.log_history, "tokens": found.predictions, "parameters": parameters(model)}


@pytest.mark.parametrize("mesh", [TP2, TP2DP2], ids=str)
def test_speech_is_predicted_by_generating(pool, tmp_path, mesh):
    (wanted,) = pool.run(speaks, str(tmp_path), None, world=1)
    for got in pool.run(speaks, str(tmp_path), mesh, world=mesh["tp"] * mesh.get("dp", 1)):
        assert got["tokens"].tolist() == wanted["tokens"].tolist()
        if mesh == TP2:  # the mean of a batch is not that of the means of its halves, whose labels differ in number
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
    from shardcore.integrations.trainer import Trainer

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


def keeps(folder: str) -> None:
    from shardcore.integrations.trainer import Trainer

    model = Own(shardcore.shard(llama().model, tp=2))
    Trainer(model=model, args=arguments(folder, save_strategy="steps"), train_dataset=words(20))


def test_a_head_that_no_checkpoint_would_have_is_refused_before_the_first_step(pool, tmp_path):
    with pytest.raises(Exception, match=r"head\.weight, head\.bias lie beside the sharded LlamaModel"):
        pool.run(keeps, str(tmp_path), world=2)


def from_scratch(folder: str, mesh: dict[str, Any] | None) -> dict[str, Any]:
    from shardcore.integrations.trainer import Trainer

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
