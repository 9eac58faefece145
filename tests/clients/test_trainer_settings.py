"""Settings and callbacks of the Trainer, and models of other kinds, on sharded models."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version

import shardcore

pytest.importorskip("accelerate", reason="the Trainer of transformers needs accelerate")

sys.path.insert(0, str(Path(__file__).parent / "support"))

from trainings_by_clients import Rows, arguments, case_of, llama, parameters, trained, words  # from support/

TP2 = {"tp": 2}
TP2DP2 = {"tp": 2, "dp": 2}


pytestmark = pytest.mark.usefixtures("float64_throughout")


def both(pool: Any, folder: Path, mesh: dict[str, Any], settings: dict[str, Any], **more: Any) -> list[Any]:
    """Return the unsharded training, and those of all ranks."""
    parts = mesh.get("dp", 1)
    found = pool.run(trained, str(folder / "one"), None, settings, world=1, **more)
    settings = {**settings, "per_device_train_batch_size": settings.get("per_device_train_batch_size", 4) // parts}
    return found + pool.run(trained, str(folder / "more"), mesh, settings, world=mesh["tp"] * parts, **more)


def same(got: dict[str, Any], wanted: dict[str, Any], bound: float = 1e-9, said: float = 1e-6) -> None:
    assert got["steps"] == wanted["steps"]
    for mine, other in zip(got["history"], wanted["history"], strict=True):
        for name in mine.keys() & {"loss", "grad_norm", "epoch", "train_loss", "num_input_tokens_seen"}:
            assert mine[name] == pytest.approx(other[name], rel=said), (name, mine, other)
    for name, parameter in wanted["parameters"].items():
        torch.testing.assert_close(got["parameters"][name], parameter, rtol=bound, atol=bound)


@pytest.mark.parametrize(
    "settings",
    [
        {"label_smoothing_factor": 0.1},
        {"recompute": True},
        {"recompute": {"use_reentrant": False}},
        {"auto_find_batch_size": True},
        {"max_grad_norm": 0.0},
        {"lr_scheduler_type": "cosine", "warmup_steps": 2, "max_steps": 7},
        {"by_length": True},
        {"optim": "sgd", "optim_args": None},
    ],
    ids=str,
)
@pytest.mark.parametrize("mesh", [TP2, TP2DP2], ids=str)
def test_settings(pool, tmp_path, mesh, settings):
    if "label_smoothing_factor" in settings and mesh == TP2DP2 and Version(version("transformers")) < Version("5"):
        pytest.skip("that Trainer multiplies the smoothed loss by the number of processes, sharded or not")
    wanted, *found = both(pool, tmp_path, mesh, settings)
    for got in found:
        same(got, wanted)


def test_labels_may_be_counted_by_each_replica(pool, tmp_path):
    wanted, *found = both(pool, tmp_path, TP2, {"average_tokens_across_devices": False})
    for got in found:
        same(got, wanted)


@pytest.mark.parametrize(
    "options",
    [
        {"enable_sequence_parallelism": True},
        {"enable_sequence_parallelism": True, "partial_gradients": "deferred"},
        {"parallel_output": True},
    ],
    ids=str,
)
def test_options_of_shard(pool, tmp_path, options):
    wanted, *found = both(pool, tmp_path, {**TP2, **options}, {"max_grad_norm": 0.3, "gradient_accumulation_steps": 2})
    for got in found:
        same(got, wanted)


def single() -> Any:
    return llama().float()


def test_bf16(pool, tmp_path):
    """To what rounding to bfloat16 makes of it: the parts of a product are rounded before they are added."""
    sgd = {"optim": "sgd", "optim_args": None, "learning_rate": 0.1}
    wanted, *found = both(pool, tmp_path, TP2DP2, {"bf16": True, "use_cpu": True, **sgd}, build=single)
    for got in found:
        same(got, wanted, bound=2e-3, said=2e-2)
        assert got["parameters"]["model.embed_tokens.weight"].dtype == torch.float32


def test_fp16_needs_a_device_and_is_refused_alike(pool, tmp_path):
    """Accelerate computes in float16 on accelerators alone, sharded or not; the CPU goes on in float32."""
    wanted, *found = both(pool, tmp_path, TP2, {"fp16": True}, build=single)
    for got in found:
        same(got, wanted, bound=1e-5, said=1e-5)


def bert() -> Any:
    model = case_of("bert", "masked_lm").build().double()
    # It does not divide its loss by the labels of the whole step, as the Trainer believes of whoever takes **kwargs.
    model.accepts_loss_kwargs = False
    return model


def vit() -> Any:
    return case_of("vit", "image_classification").build().double()


def of_case(family: str, name: str, model: Any, count: int = 4) -> Rows:
    parts = [case_of(family, name).inputs(model, seed) for seed in range(count)]
    rows = {key: torch.cat([part[key] for part in parts]) for key, value in parts[0].items() if value.ndim}
    return Rows({key: value.double() if value.is_floating_point() else value for key, value in rows.items()})


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


# Data


class Drawn(Rows):
    """Words of which some are replaced by others, drawn when a row is read."""

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        row = super().__getitem__(at)
        ids = row["input_ids"].clone()
        ids[:3] = torch.randint(3, 97, (3,))
        return {**row, "input_ids": ids}


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        rows = words(20)
        return (rows[at] for at in range(20))


def reads(folder: str, mesh: dict[str, Any], kind: str, settings: dict[str, Any]) -> list[list[int]]:
    from shardcore.integrations.trainer import Trainer

    model = shardcore.shard(llama(), **mesh)
    data = Stream() if kind == "stream" else Drawn(words(20).columns)
    trainer = Trainer(model=model, args=arguments(folder, **settings), train_dataset=data)
    torch.manual_seed(100 + dist.get_rank())  # as whoever wants other dropout masks on each rank does
    trainer.train()
    return [row for batch in trainer.get_train_dataloader() for row in batch["input_ids"].tolist()]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("drawn", {}),
        ("drawn", {"accelerator_config": {"use_seedable_sampler": False}}),
        ("stream", {"max_steps": 2}),
    ],
    ids=str,
)
def test_ranks_of_a_replica_read_the_same(pool, tmp_path, kind, settings):
    """Where they do not, the model notices and raises; the last pass is compared here."""
    settings = {**settings, "per_device_train_batch_size": 2}
    found = pool.run(reads, str(tmp_path), TP2DP2, kind, settings, world=4, timeout=100)
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert found[0] != found[2]
    if kind == "stream":
        assert sorted(found[0] + found[2]) == sorted(words(20).columns["input_ids"].tolist())


def seeds_of_workers(folder: str) -> int:
    from shardcore.integrations.trainer import Trainer

    trainer = Trainer(model=shardcore.shard(llama(), **TP2DP2), args=arguments(folder), train_dataset=words(20))
    return trainer.get_train_dataloader().worker_init_fn.keywords["rank"]


def test_workers_are_seeded_by_their_replica(pool, tmp_path):
    assert pool.run(seeds_of_workers, str(tmp_path), world=4) == [0, 0, 1, 1]


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


# Callbacks


def wishes_on_one_rank(folder: str) -> tuple[int, list[str], list[int]]:
    from transformers import TrainerCallback

    from shardcore.integrations.trainer import Trainer

    evaluated: list[int] = []

    class OnOneRank(TrainerCallback):
        """Asks for what all ranks have to do together, as a clock or a monitor on one host does."""

        def on_step_end(self, args, state, control, **kwargs):
            if dist.get_rank() == 1 and state.global_step == 2:
                control.should_save = control.should_evaluate = True
            if dist.get_rank() == 1 and state.global_step == 3:
                control.should_training_stop = True

        def on_evaluate(self, args, state, control, **kwargs):
            evaluated.append(state.global_step)

    class LogsOnTheFirst(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            if state.is_world_process_zero:
                Path(args.output_dir, "log.txt").write_text(repr(logs))

    model = shardcore.shard(llama(), tp=2)
    trainer = Trainer(
        model=model,
        args=arguments(folder),
        train_dataset=words(20),
        eval_dataset=words(6),
        callbacks=[OnOneRank(), LogsOnTheFirst()],
    )
    trainer.train()
    return trainer.state.global_step, sorted(path.name for path in Path(folder).iterdir()), evaluated


def test_what_a_callback_of_one_rank_asks_for_is_done_by_all(pool, tmp_path):
    for steps, files, evaluated in pool.run(wishes_on_one_rank, str(tmp_path), world=2):
        assert steps == 3
        assert files == ["checkpoint-2", "log.txt"]
        assert evaluated == [2]


# What is refused


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


def in_a_pipeline(folder: str) -> None:
    from shardcore.integrations.trainer import Trainer

    Trainer(model=shardcore.shard(llama(), pp=2), args=arguments(folder), train_dataset=words(20))


def test_pipelines_are_refused(pool, tmp_path):
    with pytest.raises(Exception, match="divided among the ranks of a pipeline"):
        pool.run(in_a_pipeline, str(tmp_path), world=2)


def not_sharded(folder: str) -> dict[str, Any]:
    from shardcore.integrations.trainer import Trainer, sharded

    assert sharded(Trainer) is Trainer
    trainer = Trainer(model=llama(), args=arguments(folder), train_dataset=words(20))
    trainer.train()
    return parameters(trainer.model)


def test_a_model_that_is_not_sharded_trains_as_ever(pool, tmp_path):
    (wanted,) = pool.run(trained, str(tmp_path), None, {}, world=1)
    (got,) = pool.run(not_sharded, str(tmp_path), world=1)
    for name, parameter in wanted["parameters"].items():
        torch.testing.assert_close(got[name], parameter, rtol=0, atol=0)
