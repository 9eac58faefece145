"""A step takes what was planned: the collectives to the byte, the memory too, on every pack and mesh."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent / "support"))  # the workers of the pool inherit it

import transformers
from planned_models import CONFIGS, WORKLOAD, by_kind, by_operation, planned, ran

from shardcore_planner import Workload
from shardcore_planner.calls import call_of

SEQUENCE = {"enable_sequence_parallelism": True}
MESHES = {
    "tp": {"tp": 2},
    "tp, recomputed": {"tp": 2, "checkpointing": True},
    "tp, sequence, recomputed, gathered again": {
        "tp": 2,
        **SEQUENCE,
        "sequence_keep_gathered": False,
        "checkpointing": True,
    },
    "tp x sharded": {"tp": 2, "dp_shard_size": 2},
    "tp x replicated, sequence": {"tp": 2, "dp_replicate_size": 2, **SEQUENCE},
    "cp": {"tp": 1, "cp": 2},
    "cp, ring, recomputed": {"tp": 1, "cp": 2, "context_parallel_mode": "ring_attn", "checkpointing": True},
    "tp x cp": {"tp": 2, "cp": 2},
    "replicated x sharded, recomputed": {"tp": 1, "dp_replicate_size": 2, "dp_shard_size": 2, "checkpointing": True},
}
#: One class of each pack goes through all meshes, or, with twice the blocks, through half of them that have all axes
#: and switches; the others through those that differ most.
THOROUGH = ("LlamaForCausalLM", "BertForPreTraining", "ViTForImageClassification")
OF_TWO_STACKS = {"WhisperForConditionalGeneration": list(MESHES)[2:5]}
BRIEF = ("tp x sharded",)
#: The one of the quick run.
QUICK = ("LlamaForCausalLM", "tp")
CASES = [
    pytest.param(name, mesh, marks=() if (name, mesh) == QUICK else pytest.mark.nightly)
    for name in CONFIGS
    for mesh in (MESHES if name in THOROUGH else OF_TWO_STACKS.get(name, BRIEF))
    if not ("ring" in mesh and name.startswith("Bert"))  # whose attention drops out
]


def _ran(name, fields, workload=WORKLOAD):
    return ran(name, workload, **fields)


def _settled(pool, plan, *args, world):
    """Return what was seen of a step, again while transfers on a busy machine kept what they send alive."""
    for _ in range(3):
        real, kit = pool.run(_ran, *args, world=world)[0]
        if plan.kept == real["kept",]:
            break
    return real, kit


@pytest.mark.parametrize(("name", "mesh"), CASES, ids=lambda value: str(value).replace(" ", "-"))
def test_a_step_sends_and_holds_what_was_planned(pool, name, mesh):
    fields = MESHES[mesh]
    ranks = math.prod(fields.get(size, 1) for size in ("tp", "cp", "dp_shard_size", "dp_replicate_size"))
    plan = planned(name, **fields)
    real, kit = _settled(pool, plan, name, fields, world=ranks)
    sent = Counter({key: size for key, size in real.items() if key[0] == "sent"})
    assert sent
    assert by_kind(plan) == sent
    assert by_operation(plan) == kit
    assert plan.held == {kind: real["held", kind] for kind in plan.held}
    assert plan.kept == real["kept",]
    # Here each transfer may keep what it sends alive for a moment longer.
    peak = max(size for key, size in real.items() if key[0] == "peak" and key[3] == "all")
    assert plan.peak == pytest.approx(peak, rel=0.03)


@pytest.mark.parametrize("mesh", ["tp", pytest.param("tp x sharded", marks=pytest.mark.nightly)])
def test_a_step_of_adapters_sends_and_holds_what_was_planned(pool, mesh):
    pytest.importorskip("peft")
    work, fields = dataclasses.replace(WORKLOAD, lora=4), MESHES[mesh]
    plan = planned("LlamaForCausalLM", work, **fields)
    real, _ = _settled(pool, plan, "LlamaForCausalLM", fields, work, world=math.prod(fields.values()))
    assert by_kind(plan) == Counter({key: size for key, size in real.items() if key[0] == "sent"})
    assert plan.held == {kind: real["held", kind] for kind in plan.held}
    assert plan.held["optimizer"] < plan.held["parameters"]
    assert plan.kept == real["kept",]


def test_models_of_timm(pool):
    pytest.importorskip("timm")
    real, kit = pool.run(_ran, "timm", MESHES["tp x sharded"], world=4)[0]
    plan = planned("timm", **MESHES["tp x sharded"])
    assert by_operation(plan) == kit
    assert plan.held == {kind: real["held", kind] for kind in plan.held}
    assert plan.kept == real["kept",]


@pytest.mark.parametrize("name", ["WhisperForConditionalGeneration", "T5ForConditionalGeneration"])
def test_what_generates_is_called_without_labels_too(name):
    cls = getattr(transformers, name)
    sizes = CONFIGS.get(name, {"d_model": 8, "d_ff": 8, "num_layers": 1, "vocab_size": 9})
    model = cls(cls.config_class(**sizes))
    for optimizer in ("none", "adamw"):
        call = call_of(model, Workload(seq=5, dtype="fp32", optimizer=optimizer))
        out = call.forward(model, call.inputs())
        assert (out.loss is None) == (optimizer == "none")
        assert out.logits.shape[:2] == (1, 5)
