"""One training by transformers' Trainer, sharded or not: what tests of the Trainer compare."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

import shardcore
from shardcore_testing.parity import whole


class Rows(Dataset[dict[str, Tensor]]):
    """Rows of a batch that a pack's cases make; labels of later rows are left out, so that counts differ."""

    def __init__(self, columns: Mapping[str, Tensor]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        return {name: column[at] for name, column in self.columns.items()}


def case_of(family: str, name: str) -> Any:
    cases = importlib.import_module(f"shard_{family}.cases").cases()
    return next(case for case in cases if case.name == name)


def of_case(family: str, name: str, model: Any, count: int = 4) -> Rows:
    parts = [case_of(family, name).inputs(model, seed) for seed in range(count)]
    rows = {key: torch.cat([part[key] for part in parts]) for key, value in parts[0].items() if value.ndim}
    return Rows({key: value.double() if value.is_floating_point() else value for key, value in rows.items()})


def words(count: int, seed: int = 0, length: int = 12) -> Rows:
    """Rows of tokens with other numbers of labels."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 97, (count, length), generator=generator)
    labels = ids.clone()
    for row in range(count):
        labels[row, : row % 5 + 1] = -100
    return Rows({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})


def llama(**config: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **config})).double()


def mixtral(**config: Any) -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {key: getattr(llama().config, key) for key in ("vocab_size", "hidden_size", "num_attention_heads")}
    more = {"intermediate_size": 40, "num_hidden_layers": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    more["experts_implementation"] = "eager"  # others compute in 32 bits at most
    return MixtralForCausalLM(MixtralConfig(**{**sizes, **more, **config})).double()


#: Of every trainer: each step is logged, nothing else is written; Adam's epsilon keeps tiny gradients from deciding.
SETTINGS: dict[str, Any] = {
    "report_to": [],
    "disable_tqdm": True,
    "logging_steps": 1,
    "save_strategy": "no",
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "learning_rate": 1e-3,
    "optim_args": "eps=1e-3",
    "dataloader_pin_memory": False,
}


def arguments(folder: str, kind: str = "TrainingArguments", **more: Any) -> Any:
    import transformers

    settings = {
        **SETTINGS, "output_dir": folder, "num_train_epochs": 1, "include_num_input_tokens_seen": "all", **more
    }  # fmt: skip
    # Renamed in transformers 5.
    known = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    if recompute := settings.pop("recompute", None):
        name = "activation_checkpointing" if "activation_checkpointing" in known else "gradient_checkpointing"
        settings |= {name: True, f"{name}_kwargs": recompute if isinstance(recompute, dict) else None}
    if settings.pop("by_length", False):
        named = "train_sampling_strategy" in known
        settings |= {"train_sampling_strategy": "group_by_length"} if named else {"group_by_length": True}
    return getattr(transformers, kind)(**settings)


@contextlib.contextmanager
def by_torchrun() -> Iterator[None]:
    """Let arguments of trainers count processes in here, as if torchrun had started them."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    met = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # where they have met already
    with mock.patch.dict(os.environ, {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, **met}):
        yield


def parameters(model: Any) -> dict[str, Tensor]:
    return {name: whole(p).detach().clone() for name, p in model.named_parameters()}


def trained(
    folder: str,
    mesh: Mapping[str, Any] | None,
    settings: Mapping[str, Any],
    build: Callable[..., Any] = llama,
    train: Rows | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Train, and return what it logged and the parameters after it."""
    from shardcore_trainer import Trainer

    model = build()
    if mesh:
        model = shardcore.shard(model, **mesh)
    trainer = Trainer(model=model, args=arguments(folder, **settings), train_dataset=train or words(20), **more)
    result = trainer.train()
    return {
        "history": trainer.state.log_history,
        "metrics": result.metrics,
        "steps": trainer.state.global_step,
        "parameters": parameters(model),
        "total_flos": trainer.state.total_flos,
    }


def both(pool: Any, folder: Any, mesh: dict[str, Any], settings: dict[str, Any], **more: Any) -> list[Any]:
    """Return the unsharded training, and those of all ranks."""
    parts = mesh.get("dp", 1)
    found = pool.run(trained, str(folder / "one"), None, settings, world=1, **more)
    settings = {**settings, "per_device_train_batch_size": settings.get("per_device_train_batch_size", 4) // parts}
    return found + pool.run(trained, str(folder / "more"), mesh, settings, world=mesh["tp"] * parts, **more)


def same(got: dict[str, Any], wanted: dict[str, Any], bound: float = 1e-9, said: float = 1e-6) -> None:
    assert got["steps"] == wanted["steps"]
    for mine, other in zip(got["history"], wanted["history"], strict=True):
        for name in mine.keys() & {"loss", "grad_norm", "epoch", "train_loss", "eval_loss", "num_input_tokens_seen"}:
            assert mine[name] == pytest.approx(other[name], rel=said), (name, mine, other)
    for name, parameter in wanted["parameters"].items():
        torch.testing.assert_close(got["parameters"][name], parameter, rtol=bound, atol=bound)


def accuracy(prediction: Any) -> dict[str, float]:
    """How many words are right, and a number that depends on every logit."""
    logits, labels = torch.as_tensor(prediction.predictions), torch.as_tensor(prediction.label_ids)
    counted = labels != -100
    right = (logits.argmax(-1) == labels)[counted]
    return {"accuracy": float(right.double().mean()), "logits": float(logits.double().square().sum())}


def evaluated(folder: str, mesh: Mapping[str, Any] | None, settings: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """Evaluate and predict without a training before it."""
    from shardcore_trainer import Trainer

    options = dict(mesh or {})
    model = shardcore.shard(llama(), **options) if options else llama()
    trainer = Trainer(model=model, args=arguments(folder, **settings), compute_metrics=accuracy)
    metrics = trainer.evaluate(words(rows, seed=3))
    found = trainer.predict(words(rows, seed=3))
    return {"metrics": metrics, "logits": found.predictions, "labels": found.label_ids, "predicted": found.metrics}


def resumed(
    folder: str, mesh: Mapping[str, Any] | None, settings: Mapping[str, Any], resume: bool | str = False, **more: Any
) -> dict[str, Any]:
    """Train with evaluations and checkpoints, and return what it knows in the end."""
    import transformers

    from shardcore_trainer import Trainer

    class Generators(transformers.TrainerCallback):
        """Writes down the state of the generator that data are drawn from: after saves, and before the first step."""

        saved: ClassVar[dict[int, list[int]]] = {}
        first: ClassVar[list[int]] = []

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.saved[state.global_step] = torch.get_rng_state().tolist()

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not self.first:
                self.first.extend(torch.get_rng_state().tolist())

    build = more.pop("build", llama)
    model = shardcore.shard(build(), **mesh) if mesh else build()
    more["callbacks"] = [Generators()]
    args = arguments(folder, **{"save_strategy": "steps", "save_steps": 2, **settings})
    trainer = Trainer(model=model, args=args, train_dataset=words(20), eval_dataset=words(10, seed=3), **more)
    trainer.train(resume_from_checkpoint=resume)
    return {
        "history": trainer.state.log_history,
        "steps": trainer.state.global_step,
        "best": trainer.state.best_model_checkpoint,
        "generators": (Generators.saved, Generators.first),
        "parameters": parameters(model),
        "total_flos": trainer.state.total_flos,
    }
