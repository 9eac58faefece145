"""What every pack is held to; the cases are in `shard_llama.cases`."""

from __future__ import annotations

import dataclasses

from llama_cases import SavesTooLittle

from shard_llama.cases import cases
from shardcore_testing import PolicyConformance
from shardcore_testing.checks import examine
from shardcore_testing.subject import Subject


class TestLlama(PolicyConformance):
    plugin = "shard_llama.plugin"


def test_a_checkpoint_that_lacks_a_tensor_is_caught(pool):
    # The kit's own tests have no transformers to save with.
    case = dataclasses.replace(cases()[0], policy=SavesTooLittle)
    (finding,) = examine(pool, Subject(case=case, tp=2), "saving")
    assert finding.state == "failed"
    assert "holds other tensors" in finding.message
