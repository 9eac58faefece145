"""Settings and callbacks of the Trainer, and its data, on sharded models."""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version

import shardcore
from shardcore._env import compilers

pytest.importorskip("accelerate", reason="the Trainer of transformers needs accelerate")

sys.path.insert(0, str(Path(__file__).parent / "support"))

from stacks import by_night  # from support/
from trainings_by_clients import (
    Rows,
    arguments,
    both,
    llama,
    parameters,
    resumed,
    same,
    trained,
    words,
)

TP2 = {"tp": 2}
DP2 = {"tp": 1, "dp": 2}
TP2DP2 = {"tp": 2, "dp": 2}


pytestmark = pytest.mark.usefixtures("float64_throughout")


@pytest.mark.parametrize(
    "settings",
    [
        {"label_smoothing_factor": 0.1},
        {"recompute": {"use_reentrant": False}},
        *by_night(
            [
                {"recompute": True},
                {"auto_find_batch_size": True},
                {"max_grad_norm": 0.0},
                {"lr_scheduler_type": "cosine", "warmup_steps": 2, "max_steps": 7},
                {"by_length": True},
                {"optim": "sgd", "optim_args": None},
            ],
            but=(),
        ),
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
        {"enable_sequence_parallelism": True, "partial_gradients": "deferred"},
        *by_night([{"enable_sequence_parallelism": True}, {"parallel_output": True}], but=()),
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


def test_fp16_needs_a_device_and_is_left_out_alike(pool, tmp_path):
    """Accelerate computes in float16 on accelerators alone, sharded or not; the CPU goes on in float32, unscaled."""
    wanted, *found = both(pool, tmp_path, TP2, {"fp16": True}, build=single)
    for got in found:
        same(got, wanted, bound=1e-5, said=1e-5)


# What is counted


def padded(count: int) -> Rows:
    """Rows of other lengths, so that replicas count other numbers of tokens."""
    rows = words(count)
    for row in range(count):
        rows.columns["attention_mask"][row, : row % 7] = 0
        rows.columns["labels"][row, : row % 7 + 1] = -100
    return rows


def counts_tokens(folder: str, mesh: dict[str, Any] | None, kind: str) -> dict[str, Any]:
    """What a training and an evaluation count: totals, and what they say in a second times the seconds."""
    from shardcore_trainer import Trainer

    model = shardcore.shard(llama(), **mesh) if mesh else llama()
    size = 4 // (mesh or {}).get("dp", 1)
    settings = {"include_num_input_tokens_seen": kind, "max_steps": 12, "gradient_accumulation_steps": 2}
    sizes = {"per_device_train_batch_size": size, "per_device_eval_batch_size": size}
    args = arguments(folder, **settings, **sizes)
    trainer = Trainer(model=model, args=args, train_dataset=padded(16), eval_dataset=words(10))
    train = trainer.train().metrics
    evaluation = trainer.evaluate()
    last = next(row for row in reversed(trainer.state.log_history) if "train_tokens_per_second" in row)
    return {
        "seen": [row["num_input_tokens_seen"] for row in trainer.state.log_history],
        "total": trainer.state.num_input_tokens_seen,
        "in all": {
            "tokens": last["train_tokens_per_second"] * last["train_runtime"],
            "samples": train["train_samples_per_second"] * train["train_runtime"],
            "steps": train["train_steps_per_second"] * train["train_runtime"],
            "evaluated samples": evaluation["eval_samples_per_second"] * evaluation["eval_runtime"],
            "evaluated steps": evaluation["eval_steps_per_second"] * evaluation["eval_runtime"],
        },
    }


@pytest.mark.parametrize("kind", by_night(["all", "non_padding"], but=["non_padding"]))
@pytest.mark.parametrize("mesh", by_night([TP2, DP2, TP2DP2], but=[DP2]), ids=str)
def test_tokens_and_samples_are_those_of_replicas(pool, tmp_path, mesh, kind):
    if kind == "non_padding" and Version(version("transformers")) < Version("5"):
        pytest.skip("that Trainer counts all tokens")
    (wanted,) = pool.run(counts_tokens, str(tmp_path / "one"), None, kind, world=1)
    assert wanted["total"] == 12 * 2 * 4 * 12 if kind == "all" else wanted["total"] < 12 * 2 * 4 * 12
    truth = {"samples": 96, "steps": 12, "evaluated samples": 10, "evaluated steps": 3, "tokens": wanted["total"]}
    for got in pool.run(counts_tokens, str(tmp_path / "more"), mesh, kind, world=mesh["tp"] * mesh.get("dp", 1)):
        assert got["seen"] == wanted["seen"]
        assert got["total"] == wanted["total"]
        assert got["in all"] == pytest.approx(truth, rel=0.25)  # seconds are rounded


# Compilation


def compiled(folder: str, mesh: dict[str, Any] | None, settings: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A training by ``torch_compile``, with evaluations and checkpoints on the way."""
    counted = torch._dynamo.utils.counters
    torch._dynamo.reset()
    counted.clear()
    try:
        with warnings.catch_warnings():
            # torch looks at the activations on which a graph begins that FSDP2 has broken.
            warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf")
            # Models of transformers 4 have casts that break graphs of torch before 2.14.
            warnings.filterwarnings("ignore", "Dynamo does not know how to trace the builtin")
            found = resumed(folder, mesh, settings, **more)
    finally:
        # TrainingArguments tell Accelerate by these.
        os.environ.pop("ACCELERATE_DYNAMO_BACKEND", None)
        os.environ.pop("ACCELERATE_DYNAMO_MODE", None)
    return {**found, "calls": counted["stats"]["calls_captured"], "breaks": sum(counted["graph_break"].values())}


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler of torch before 2.14
@pytest.mark.parametrize("mesh", [TP2, TP2DP2], ids=str)
def test_compiled_by_torch(pool, tmp_path, mesh):
    """Steps, evaluations, and what a checkpoint of it makes of a model that is not compiled."""
    settings = {"eval_strategy": "steps", "eval_steps": 2, "gradient_accumulation_steps": 2}
    (wanted,) = pool.run(resumed, str(tmp_path / "one"), None, settings, world=1)
    parts = mesh.get("dp", 1)
    settings |= {"per_device_train_batch_size": 4 // parts, "per_device_eval_batch_size": 4 // parts}
    world, folder, eager = mesh["tp"] * parts, str(tmp_path / "more"), {"torch_compile_backend": "aot_eager"}
    for got in pool.run(compiled, folder, mesh, {**settings, **eager}, world=world, timeout=200):
        assert got["calls"] > 100
        # FSDP2 breaks the graph where it gathers, and the models of transformers 4 do.
        assert parts > 1 or Version(version("transformers")) < Version("5") or not got["breaks"]
        same(got, wanted)
    for got in pool.run(resumed, folder, mesh, settings, f"{folder}/checkpoint-2", world=world):
        for name, parameter in wanted["parameters"].items():
            torch.testing.assert_close(got["parameters"][name], parameter, rtol=1e-9, atol=1e-9)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler of torch before 2.14
@pytest.mark.skipif(not any(map(shutil.which, compilers())), reason="inductor needs a C++ compiler")
def test_compiled_by_inductor(pool, tmp_path):
    small = partial(llama, num_hidden_layers=1)
    (wanted,) = pool.run(resumed, str(tmp_path / "one"), None, {}, build=small, world=1)
    settings = {"torch_compile": True, "eval_strategy": "no"}
    for got in pool.run(compiled, str(tmp_path / "more"), TP2, settings, build=small, world=2, timeout=300):
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
    from shardcore_trainer import Trainer

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
    from shardcore_trainer import Trainer

    trainer = Trainer(model=shardcore.shard(llama(), **TP2DP2), args=arguments(folder), train_dataset=words(20))
    return trainer.get_train_dataloader().worker_init_fn.keywords["rank"]


def test_workers_are_seeded_by_their_replica(pool, tmp_path):
    assert pool.run(seeds_of_workers, str(tmp_path), world=4) == [0, 0, 1, 1]


# Callbacks


def wishes_on_one_rank(folder: str) -> tuple[int, list[str], list[int]]:
    from transformers import TrainerCallback

    from shardcore_trainer import Trainer

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


def not_sharded(folder: str) -> dict[str, Any]:
    from shardcore_trainer import Trainer, sharded

    assert sharded(Trainer) is Trainer
    trainer = Trainer(model=llama(), args=arguments(folder), train_dataset=words(20))
    trainer.train()
    return parameters(trainer.model)


def test_a_model_that_is_not_sharded_trains_as_ever(pool, tmp_path):
    (wanted,) = pool.run(trained, str(tmp_path), None, {}, world=1)
    (got,) = pool.run(not_sharded, str(tmp_path), world=1)
    for name, parameter in wanted["parameters"].items():
        torch.testing.assert_close(got[name], parameter, rtol=0, atol=0)


def metered(folder: str) -> tuple[list[str], list[dict[str, Any]]]:
    from shardcore_loop import StepMeter
    from shardcore_trainer import MeterCallback, Trainer

    said: list[str] = []
    model = shardcore.shard(llama(), **TP2)
    meter = StepMeter(model, every=1, peak=1e9, say=said.append)
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "eval_strategy": "steps"}
    data = {"train_dataset": words(20), "eval_dataset": words(4)}
    trainer = Trainer(model=model, args=arguments(folder, **settings), callbacks=[MeterCallback(meter)], **data)
    trainer.train()
    return said, trainer.state.log_history


def test_a_meter_says_how_fast_a_training_is(pool, tmp_path):
    (said, history), (others, _) = pool.run(metered, str(tmp_path), world=2)
    assert [line.partition(":")[0] for line in said] == ["step 4", "step 5"]
    assert others == []
    logged = [entry for entry in history if "loss" in entry]
    assert ["mfu" in entry for entry in logged] == [False, False, False, True, True]
    for entry in logged[3:]:  # two batches of two rows
        assert entry["tokens_per_second"] == pytest.approx(2 * 2 * 12 / entry["step_time"])
        assert 0.0 < entry["collectives"] <= 1.0


def fails_while_it_is_profiled(folder: str) -> None:
    from shardcore_loop import StepMeter
    from shardcore_trainer import MeterCallback, Trainer

    model = shardcore.shard(llama(), **TP2)
    callback = MeterCallback(StepMeter(model))
    data = {"train_dataset": words(20)}
    trainer = Trainer(model=model, args=arguments(folder, max_steps=4), callbacks=[callback], **data)

    def fail(*_: Any) -> None:
        if trainer.state.global_step == 2:  # in the third step
            raise ZeroDivisionError

    model.register_forward_pre_hook(fail)
    hooks = len(model._forward_pre_hooks)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert not torch.autograd._profiler_enabled()
    assert len(model._forward_pre_hooks) == hooks


def test_a_training_that_fails_leaves_no_profile_open(pool, tmp_path):
    pool.run(fails_while_it_is_profiled, str(tmp_path), world=2)
