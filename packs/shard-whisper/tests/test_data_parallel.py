"""Whisper under FSDP2: generation, which calls the encoder by itself, and the parts of the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from whisper_cases import inputs, pair, shard, speech

from shardcore.mesh.context import context_of
from shardcore_testing.parity import assert_close, assert_same_gradients

GREEDY = {"max_new_tokens": 8, "do_sample": False}
MESHES = {"dp": {"tp": 1, "dp": 2}, "tp-dp": {"tp": 2, "dp": 2}, "replicas": {"tp": 1, "dp_replicate_size": 2}}


def _tokens(out: Any) -> Tensor:
    return out if isinstance(out, Tensor) else out["sequences"]


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", MESHES)
def test_generation(pool, listener, mesh):
    pool.run(_generation, listener, MESHES[mesh], world=4 if mesh == "tp-dp" else 2)


def _generation(folder: str, sizes: dict[str, int]) -> None:
    reference, model = (
        transformers.WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float64) for _ in range(2)
    )
    shard(model, **sizes)
    features, tokens = speech(4, 7, torch.float64)
    parameters = {name: id(p) for name, p in model.named_parameters()}
    for step in range(2):
        for m in (reference, model):
            m.eval()
        wanted, got = (_tokens(m.generate(input_features=features, **GREEDY)) for m in (reference, model))
        assert torch.equal(wanted, got)
        assert {name: id(p) for name, p in model.named_parameters()} == parameters
        for m in (reference, model):
            m.train()(input_features=features, labels=tokens).loss.backward()
        assert_same_gradients(reference, model)
        for m in (reference, model):
            torch.optim.SGD(m.parameters(), lr=0.1 * step).step()
            m.zero_grad()


def test_replicas_that_generate_from_their_own_speech(pool, listener):
    pool.run(_own_speech, listener, world=2)


def _own_speech(folder: str) -> None:
    reference = transformers.WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float64).eval()
    model = transformers.WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float64).eval()
    replica = context_of(shard(model, tp=1, dp=2)).replica
    features, _ = speech(2, 7 + replica, torch.float64)
    way = {"input_features": features, "do_sample": False, "max_new_tokens": 8 - 3 * replica}
    wanted, got = reference.generate(**way), model.generate(**way, synced_gpus=True)
    assert torch.equal(_tokens(wanted), _tokens(got))


def test_parts(pool):
    pool.run(_parts, {"tp": 1, "dp": 2}, world=2)
    pool.run(_parts, {"tp": 2, "dp": 2}, world=4)


def _parts(sizes: dict[str, int]) -> None:
    reference, _ = pair()
    model, _ = pair()
    model = shard(model, **sizes)
    for seed in range(2):
        batch = inputs(reference, seed)
        ids = batch["labels"].clamp(min=0)

        def way(m: Any, batch: Any = batch, ids: Any = ids) -> Any:
            states = m.get_encoder()(batch["input_features"]).last_hidden_state
            hidden = m.get_decoder()(input_ids=ids, encoder_hidden_states=states).last_hidden_state
            return m.proj_out(hidden) + m(input_features=batch["input_features"], decoder_input_ids=ids).logits

        wanted, got = way(reference), way(model)
        assert_close(wanted, got, "logits")
        for out in (wanted, got):
            out.square().mean().backward()
    assert_same_gradients(reference, model)
