"""Gradient checkpointing: what the unsharded model cannot do is known, and fails in the sharded one alike."""

from __future__ import annotations

import copy

import pytest
from whisper_cases import REENTRANT, build, checkpointing, inputs, shard

from shardcore.testing.parity import assert_close, assert_same_gradients

AGAIN = "backward through the graph a second time"


@pytest.mark.skipif(REENTRANT, reason="transformers 5 gives the encoder's states to the layers by position")
def test_known_failure_of_reentrant_checkpoints(pool):
    pool.run(_fails, world=2)


def _fails() -> None:
    reference = build("WhisperForConditionalGeneration").double().train()
    model = copy.deepcopy(reference)
    for m in (reference, shard(model)):
        checkpointing(m, {"use_reentrant": True})
        loss = m(**inputs(m, 0)).loss
        with pytest.raises(RuntimeError, match=AGAIN):
            loss.backward()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # of the encoder's layers
def test_reentrant_checkpoints_of_what_attends_to_given_states(pool):
    # The states need no gradient: nothing is lost by giving them by keyword.
    pool.run(_frozen, world=2)


def _frozen() -> None:
    reference = build("WhisperForConditionalGeneration").double().train()
    reference.freeze_encoder()
    model = shard(copy.deepcopy(reference))
    batch = inputs(reference, 0)
    losses = []
    for m in (reference, model):
        m.model.decoder.embed_tokens.weight.requires_grad_()
        checkpointing(m, {"use_reentrant": True})
        losses.append(m(**batch).loss)
        losses[-1].backward()
    assert_close(losses[0], losses[1], "loss")
    assert_same_gradients(reference, model)
