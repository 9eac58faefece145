"""What Whisper costs: three collectives for a decoder layer each way, and one for the encoder's states in all."""

from __future__ import annotations

import pytest
import torch
from whisper_cases import build, inputs, loss_of, pair, shard

from shardcore_testing.observing import Collectives
from shardcore_testing.parity import assert_close, assert_same_gradients

LAYERS = ("encoder_layers", "decoder_layers")


def _count(name: str, encoder: int, decoder: int, freeze: bool = False) -> tuple[int, int]:
    model = shard(build(name, **dict(zip(LAYERS, (encoder, decoder), strict=True))).double().train())
    if freeze:
        model.freeze_encoder()
    batch = inputs(model, 0)
    with Collectives() as seen:
        loss = loss_of(model(**batch))
        forward = seen.take()
        loss.backward()
        return forward, seen.take()


@pytest.mark.parametrize("name", ["WhisperForConditionalGeneration", "WhisperModel"])
def test_states_enter_once(pool, name):
    head = name == "WhisperForConditionalGeneration"  # the logits are gathered, and their input gradient is summed
    for encoder, decoder in ((2, 2), (2, 3), (3, 2)):
        (counted, other) = pool.run(_count, name, encoder, decoder, world=2)
        assert counted == other
        blocks = 2 * encoder + 3 * decoder
        # Once more for the embedding; once more for the encoder's states, however many layers attend to them.
        assert counted == (blocks + 1 + head, blocks + 1 + head)


def test_a_frozen_encoder_costs_nothing_backwards(pool):
    for decoder in (2, 3):
        (forward, backward), _ = pool.run(_count, "WhisperForConditionalGeneration", 2, decoder, True, world=2)
        assert forward == 4 + 3 * decoder + 2
        assert backward == 3 * decoder + 1


def test_gradients_of_states_that_the_caller_gives(pool):
    pool.run(_states, "WhisperForCausalLM", world=2)
    pool.run(_states, "WhisperForConditionalGeneration", world=2)


def _states(name: str) -> None:
    reference, model = pair(name)
    for seed in (0, 1):
        batch = inputs(reference, seed)
        batch.pop("input_features", None)
        drawn = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        grads, losses = [], []
        for m in (reference, model):
            states = drawn.clone().requires_grad_()
            losses.append(m(**{**batch, "encoder_outputs": (states,)}).loss)
            losses[-1].backward()
            grads.append(states.grad)
        assert_close(losses[0], losses[1], "loss")
        assert_close(grads[0], grads[1], "gradient of the encoder's states")
    assert_same_gradients(reference, model)
