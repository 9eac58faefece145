"""Gradient checkpointing of a decoder whose encoder is frozen."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from whisper_cases import build, inputs, shard

from shardcore_testing.parity import assert_close, assert_same_gradients
from shardcore_testing.subject import checkpointing


# Of the encoder's layers; the states need no gradient, so that nothing is lost where layers get them by keyword.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("kind", [{"use_reentrant": True}, {"use_reentrant": False}], ids=str)
def test_a_frozen_encoder(pool, kind):
    pool.run(_frozen, kind, world=2)


def _frozen(kind: dict[str, Any]) -> None:
    reference = build("WhisperForConditionalGeneration").double().train()
    reference.freeze_encoder()
    model = shard(copy.deepcopy(reference))
    batch = inputs(reference, 0)
    losses = []
    for m in (reference, model):
        checkpointing(m, kind)
        losses.append(m(**batch).loss)
        losses[-1].backward()
    assert_close(losses[0], losses[1], "loss")
    assert_same_gradients(reference, model)
