"""TRL's trainers with sharded models log what they do with the unsharded model, and make the same steps.

TRL computes log-probabilities in float32, whatever the model is. Where the batches of a replica are those of a process
that accumulates gradients, that process is what parameters are compared with; what TRL pools over all rows of a step is
compared with a process that has them in one batch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="the trainers are those of TRL, which is not installed")
peft = pytest.importorskip("peft")

# The workers of the pool inherit the path.
sys.path.insert(0, str(Path(__file__).parent / "support"))

import trl  # noqa: E402  # after it is known to be there
from packaging.version import Version  # noqa: E402

from stacks import by_night  # noqa: E402  # from support/
from trainings_by_trl import launched, refused, reward, trained, worth  # noqa: E402  # from support/

#: Since then TRL multiplies with the head by itself, logs more, and evaluates each replica's batch by itself.
FUSED = Version(trl.__version__) >= Version("1.0")
TP2 = {"tp": 2}
TP2DP2 = {"tp": 2, "dp": 2}
_CLOCKS = ("runtime", "per_second", "step_time")

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of TRL, about its own settings and those of transformers
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:trl"),
]


def lora(**more: Any) -> Any:
    return peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", **more)


def numbers(entry: dict[str, Any]) -> dict[str, float]:
    found = {name: value for name, value in entry.items() if isinstance(value, int | float)}
    return {name: value for name, value in found.items() if not any(word in name for word in _CLOCKS)}


def same_history(got: dict[str, Any], wanted: dict[str, Any], bound: float, without: tuple[str, ...] = ()) -> None:
    assert got["steps"] == wanted["steps"]
    assert len(got["history"]) == len(wanted["history"])
    for mine, other in zip(got["history"], wanted["history"], strict=True):
        assert mine.keys() == other.keys()
        for name, value in numbers(other).items():
            if name not in without:
                assert mine[name] == pytest.approx(value, rel=bound, abs=bound), (name, mine, other)


def same_parameters(got: dict[str, Any], wanted: dict[str, Any], bound: float) -> None:
    assert got["parameters"].keys() == wanted["parameters"].keys()
    assert got["adapters"] == wanted["adapters"]
    for name, parameter in wanted["parameters"].items():
        torch.testing.assert_close(got["parameters"][name], parameter, rtol=bound, atol=bound, msg=name)


def moved(result: dict[str, Any]) -> None:
    """A training in which nothing happens would prove nothing."""
    assert max(entry.get("grad_norm", 0.0) for entry in result["history"]) > 1e-2


SFT: dict[str, dict[str, Any]] = {
    "text": {"evaluate": 6},
    "completions": {"kind": "completion", "options": {"completion_only_loss": True}},
    "answers": {"kind": "chat", "options": {"assistant_only_loss": True}},
    "packed": {"options": {"packing": True, "max_length": 24, "packing_strategy": "wrapped"}},
    "recomputed": {"options": {"gradient_checkpointing": True}},
    "adapters": {"adapters": lora()},
}


@pytest.mark.parametrize("name", by_night(SFT, but={"completions", "packed", "adapters"}))
def test_sft(pool, tmp_path, name):
    (wanted,) = pool.run(trained, str(tmp_path / "one"), None, world=1, **SFT[name])
    moved(wanted)
    for got in pool.run(trained, str(tmp_path / "two"), TP2, world=2, **SFT[name]):
        same_history(got, wanted, 1e-6)
        same_parameters(got, wanted, 1e-9)


@pytest.mark.nightly
def test_sft_under_sequence_parallelism(pool, tmp_path):
    (wanted,) = pool.run(trained, str(tmp_path / "one"), None, world=1)
    mesh = {**TP2, "enable_sequence_parallelism": True}
    for got in pool.run(trained, str(tmp_path / "two"), mesh, world=2):
        same_history(got, wanted, 1e-6)
        same_parameters(got, wanted, 1e-9)


DPO: dict[str, dict[str, Any]] = {
    "reference": {"reference": 1.1, "evaluate": 6},
    "copy": {"reference": 1.0},
    "adapters": {"adapters": lora()},
    "unsharded": {"reference": 1.1, "whole_reference": True},
    "moving": {"reference": 1.1, "options": {"sync_ref_model": True, "ref_model_sync_steps": 2}},
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", DPO)
def test_dpo(pool, tmp_path, name):
    case = {"method": "DPO", "kind": "preference", **DPO[name]}
    (wanted,) = pool.run(trained, str(tmp_path / "one"), None, world=1, **case)
    moved(wanted)
    if name == "copy":
        case["reference"] = None  # the sharded model is copied
    for got in pool.run(trained, str(tmp_path / "two"), TP2, world=2, **case):
        same_history(got, wanted, 1e-6)
        same_parameters(got, wanted, 1e-9)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "case",
    [
        {"kind": "completion", "evaluate": 8},
        {"adapters": lora(), "before": True},
        {"adapters": lora(), "drawn": 3},
        {"method": "DPO", "kind": "preference", "reference": 1.1, "evaluate": 8},
        {"method": "DPO", "kind": "preference", "reference": 1.1, "adapters": lora(), "before": True},
    ],
    ids=["sft", "sft-adapters", "sft-adapters-after", "dpo", "dpo-adapters"],
)
def test_two_replicas(pool, tmp_path, case):
    if case.get("method") == "DPO" and "before" in case and not FUSED:
        pytest.skip("this release merges adapters that are there into the model, and takes no reference beside them")
    pooling = not FUSED and case.get("method") != "DPO"
    half = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
    (pooled,) = pool.run(trained, str(tmp_path / "one"), None, world=1, **case)
    options = {**half, "gradient_accumulation_steps": 2}
    (wanted,) = pool.run(trained, str(tmp_path / "parts"), None, world=1, options=options, **case)
    moved(wanted)
    # Batches of another length have other numbers of operations; 0.25 averages entropies and logits over padding, too.
    padded = [f"{when}{name}" for when in ("", "eval_") for name in ("entropy", "logits/chosen", "logits/rejected")]
    without = ("total_flos", "eval_loss", *padded)
    for got in pool.run(trained, str(tmp_path / "four"), TP2DP2, world=4, options=half, **case):
        same_history(got, pooled, 2e-5, without)
        same_parameters(got, wanted, 1e-8)
        evaluations = [
            [e["eval_loss"] for e in run["history"] if "eval_loss" in e] for run in (got, pooled if pooling else wanted)
        ]
        assert evaluations[0] == pytest.approx(evaluations[1], rel=1e-5)


#: Trainers that are no more than compared.
OTHERS: dict[str, dict[str, Any]] = {
    "Reward": {"kind": "preference", "evaluate": 6},
    "KTO": {"kind": "judged", "reference": 1.1},
}


@pytest.mark.nightly
@pytest.mark.parametrize("method", OTHERS)
def test_other_trainers(pool, tmp_path, method):
    case = {"method": method, **OTHERS[method]}
    (wanted,) = pool.run(trained, str(tmp_path / "one"), None, world=1, **case)
    moved(wanted)
    for rank, got in enumerate(pool.run(trained, str(tmp_path / "two"), TP2, world=2, **case)):
        if rank == 0 or FUSED:  # before TRL 1.0 KTO's numbers are those of the main process, which logs
            same_history(got, wanted, 1e-6)
        same_parameters(got, wanted, 1e-9)


@pytest.mark.nightly
def test_grpo(pool, tmp_path):
    # With top_k=1 the random stream of the model does not matter; it learns from the reference then, not from rewards.
    options = {"top_k": 1, "num_generations": 2, "max_completion_length": 6, "beta": 0.5}
    case = {"method": "GRPO", "kind": "prompt", "rewards": reward, "saved": 1.1, "options": options}
    (wanted,) = pool.run(trained, str(tmp_path / "one"), None, world=1, **case)
    moved(wanted)
    for got in pool.run(trained, str(tmp_path / "two"), TP2, world=2, **case):
        same_history(got, wanted, 1e-5)
        same_parameters(got, wanted, 1e-6)  # what cancels out of two answers alike is float32's


#: Of answers that are worth different rewards.
REWARDED: dict[str, dict[str, Any]] = {
    "groups": {"method": "GRPO", "evaluate": 8},
    "batches": {"method": "GRPO", "options": {"scale_rewards": "batch"}},
    "accumulated": {"method": "GRPO", "options": {"gradient_accumulation_steps": 2}},
    "leave-one-out": {"method": "RLOO", "saved": 1.1, "options": {"normalize_advantages": True, "beta": 0.1}},
}


def rewarded(name: str, **options: Any) -> dict[str, Any]:
    case = {"kind": "prompt", "rewards": worth, "answers": True, **REWARDED[name]}
    settings = {"num_generations": 2, "max_completion_length": 6, **case.get("options", {}), **options}
    return {**case, "options": settings}


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", [TP2, TP2DP2], ids=["tp2", "tp2dp2"])
@pytest.mark.parametrize("name", REWARDED)
def test_rewards(pool, tmp_path, name, mesh):
    replicas = mesh.get("dp", 1)
    (wanted,) = pool.run(trained, str(tmp_path / "one"), None, world=1, **rewarded(name))
    moved(wanted)
    sizes = {f"per_device_{what}_batch_size": 4 // replicas for what in ("train", "eval")}
    case = rewarded(name, **sizes)
    for got in pool.run(launched, str(tmp_path / "more"), mesh, world=2 * replicas, **case):
        # Averages of averages over replicas; before TRL 1.0 that of the distance to the reference too.
        apart = ("total_flos", "entropy", *(() if FUSED else ("kl",)))
        same_history(got, wanted, 1e-5, without=apart if replicas > 1 else ())
        same_parameters(got, wanted, 1e-6)  # log-probabilities are float32's
        for column, values in wanted["table"].items():
            exactly = all(isinstance(value, str) for value in values)
            assert got["table"][column] == (values if exactly else pytest.approx(values, rel=1e-6, abs=1e-6)), column


@pytest.mark.nightly
def test_replicas_generate_answers_of_other_lengths(pool, tmp_path):
    # One replica is done before the other: of these prompts some are answered in two words, some in twelve.
    ends = {"sequence_bias": [[[1], 0.1]]}
    options = {"top_k": 1, "num_generations": 2, "max_completion_length": 12, "beta": 0.5, "generation_kwargs": ends}
    case = {"method": "GRPO", "kind": "prompt", "rewards": worth, "saved": 1.1}
    (wanted,) = pool.run(trained, str(tmp_path / "one"), None, world=1, options=options, **case)
    lengths = [[entry[f"completions/{end}_length"] for end in ("min", "max")] for entry in wanted["history"][:-1]]
    assert any(shortest < longest for shortest, longest in lengths)
    half = {**options, "per_device_train_batch_size": 2}
    for got in pool.run(launched, str(tmp_path / "four"), TP2DP2, world=4, options=half, **case):
        same_history(got, wanted, 1e-5, without=("total_flos", "entropy", "kl"))
        same_parameters(got, wanted, 1e-6)


REFUSED: dict[str, tuple[dict[str, Any], int, dict[str, Any], str]] = {
    "groups": (
        TP2,
        2,
        {"method": "GRPO", "kind": "prompt", "rewards": reward, "options": {"num_generations": 4}},
        "no whole groups of num_generations=4",
    ),
    "evaluated groups": (
        TP2,
        2,
        {
            "method": "GRPO",
            "kind": "prompt",
            "rewards": reward,
            "evaluate": 4,
            "options": {"num_generations": 4, "per_device_train_batch_size": 4},
        },
        "no whole groups of 4 answers",
    ),
    "copy": (TP2DP2, 4, {"method": "DPO", "kind": "preference"}, "torch cannot copy"),
    "adapters": (TP2DP2, 4, {"adapters": lora(modules_to_save=["lm_head"])}, "Attach it before shard"),
    "rows": (
        TP2DP2,
        4,
        {"method": "DPO", "kind": "preference", "reference": 1.0, "evaluate": 6},
        "6 samples of eval_dataset do not fill",
    ),
}
if FUSED:
    precomputed = {"method": "DPO", "kind": "preference", "options": {"precompute_ref_log_probs": True}}
    copied = {"method": "DPO", "kind": "preference", "adapters": lora(), "before": True}
    REFUSED["hash"] = (TP2, 2, precomputed, "a hash of all parameters")
    REFUSED["adapter"] = (TP2DP2, 4, copied, "adds a copy of the adapter")


def test_what_cannot_work_is_refused_before_the_first_step(pool, tmp_path):
    for name, (mesh, world, case, words) in REFUSED.items():
        options = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, **case.get("options", {})}
        found = pool.run(refused, str(tmp_path / name), mesh, world=world, **{**case, "options": options})
        assert all(words in message for message in found), (name, found)
