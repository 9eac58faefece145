"""What transformers 4 cannot do with an unsharded Whisper fails in the sharded one alike, with the same words."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from whisper_cases import REENTRANT, build, inputs, shard

from shardcore_testing.subject import checkpointing

pytestmark = pytest.mark.skipif(REENTRANT, reason="transformers 5 can do it")


def _twins(name: str) -> tuple[Any, Any]:
    reference = build(name).double().train()
    return reference, shard(copy.deepcopy(reference))


def test_reentrant_checkpoints(pool):
    pool.run(_reentrant, world=2)


def _reentrant() -> None:
    for m in _twins("WhisperForConditionalGeneration"):
        checkpointing(m, {"use_reentrant": True})
        loss = m(**inputs(m, 0)).loss
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()


def test_a_cache_beside_given_states(pool):
    pool.run(_cached, world=2)


def _cached() -> None:
    for m in _twins("WhisperForCausalLM"):
        with pytest.raises(UnboundLocalError, match="is_updated"):
            m(**{**inputs(m, 0), "use_cache": True})
