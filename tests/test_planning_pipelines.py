"""A step of a pipeline takes what was planned: on every rank, what is sent and held to the byte."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent / "support"))  # the workers of the pool inherit it

from planned_models import planned
from planned_pipelines import WORKLOAD, ran, sent

MESHES = {
    "1f1b": {"num_microbatches": 4},
    "gpipe, recomputed": {"num_microbatches": 8, "pipeline_schedule": "gpipe", "checkpointing": True},
    "interleaved": {"num_microbatches": 4, "pipeline_schedule": "interleaved"},
    "zbv": {"num_microbatches": 4, "pipeline_schedule": "zbv"},
    "tp, sequence": {"num_microbatches": 4, "tp": 2, "enable_sequence_parallelism": True},
    "sharded": {"num_microbatches": 4, "dp_shard_size": 2},
}
CASES = [
    *(("LlamaForCausalLM", mesh) for mesh in MESHES),
    ("BertForMaskedLM", "1f1b"),
    ("BertForMaskedLM", "tp, sequence"),
    ("WhisperForConditionalGeneration", "interleaved"),
]
#: The one of the quick run.
QUICK = ("LlamaForCausalLM", "1f1b")


def _ran(name, fields):
    return ran(name, **fields)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [pytest.param(*case, marks=() if case == QUICK else pytest.mark.nightly) for case in CASES],
    ids=lambda value: str(value).replace(" ", "-"),
)
def test_a_step_of_a_pipeline_sends_and_holds_what_was_planned(pool, name, mesh):
    fields = {"pp": 2, "tp": 1, **MESHES[mesh]}
    others = fields["tp"] * fields.get("dp_shard_size", 1)
    plan = planned(name, WORKLOAD, **fields).pipeline
    real = pool.run(_ran, name, fields, world=2 * others)
    for found in plan.ranks:
        there = real[found.rank * others]
        assert sent(found.traffic) == there["sent"]
        assert found.held == there["held"]
        assert found.peak == pytest.approx(there["peak"], rel=0.1)
