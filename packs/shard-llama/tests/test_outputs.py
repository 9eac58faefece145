"""Attention weights and hidden states that a caller asks for are whole, right and differentiable (H17)."""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch
from llama_cases import batch, build, shard
from torch import Tensor

import shardcore
from shard_llama.policy import LlamaPolicy
from shardcore._torch import CAN_PIPELINE
from shardcore.errors import NotSupportedError
from shardcore_testing.parity import assert_close, assert_same_gradients
from shardcore_testing.subject import checkpointing

CAPTURES = importlib.util.find_spec("transformers.utils.output_capturing") is not None
CAPTURE = {"output_attentions": True, "output_hidden_states": True}


@pytest.mark.nightly
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("captured_before", [False, True], ids=["fresh", "captured-before"])
def test_captured_outputs(pool, captured_before, world):
    pool.run(_captured, captured_before, world=world)


def _captured(captured_before: bool) -> None:
    for name in ("LlamaForCausalLM", "LlamaModel", "LlamaForSequenceClassification"):
        reference = build(name, attn_implementation="eager", num_key_value_heads=2)
        model = copy.deepcopy(reference)
        if captured_before:  # transformers installs its capturing hooks at the first use
            model(**batch(model), **CAPTURE)
        shard(model)
        wanted, got = (m(**batch(m), **CAPTURE) for m in (reference, model))
        _compare(wanted, got, heads=4)
        for out in (wanted, got):
            _loss_over([*out.attentions, *out.hidden_states]).backward()
        assert_same_gradients(reference, model)
        # As a tuple, in the same places.
        wanted, got = (m(**batch(m), **CAPTURE, return_dict=False) for m in (reference, model))
        assert isinstance(got, tuple)
        assert len(wanted) == len(got)
        for mine, theirs in zip(_flat(wanted), _flat(got), strict=True):
            assert_close(mine, theirs, "tuple")
        # One alone, none, and asked for by the configuration.
        assert model(**batch(model), output_attentions=True).hidden_states is None
        assert model(**batch(model), output_hidden_states=True).attentions is None
        assert model(**batch(model)).attentions is None
        for m in (reference, model):
            m.config.output_attentions = m.config.output_hidden_states = True
        _compare(reference(**batch(reference)), model(**batch(model)), heads=4)


def _compare(wanted, got, heads: int) -> None:
    assert len(wanted.attentions) == len(got.attentions) == 2
    assert len(wanted.hidden_states) == len(got.hidden_states) == 3
    for name in ("attentions", "hidden_states"):
        for i, (mine, theirs) in enumerate(zip(wanted[name], got[name], strict=True)):
            assert_close(mine, theirs, f"{name}[{i}]")
    assert got.attentions[0].shape == (3, heads, 8, 8)


def _loss_over(tensors: list[Tensor]) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return sum((t * torch.randn(t.shape, generator=generator, dtype=t.dtype)).sum() for t in tensors)


def _flat(values) -> list[Tensor]:
    return [t for value in values for t in (_flat(value) if isinstance(value, tuple) else [value])]


@pytest.mark.skipif(not (CAN_PIPELINE and CAPTURES), reason="stages, and what they capture, are seen since then")
def test_captured_outputs_of_stages(pool):
    pool.run(_of_stages, world=2)


def _of_stages() -> None:
    """Each stands in the place of its layer; what earlier stages have captured is None."""
    reference = build(attn_implementation="eager")
    model = shardcore.shard(copy.deepcopy(reference), pp=2, num_microbatches=1)
    with torch.no_grad():
        wanted, got = (m(**batch(m), **CAPTURE, use_cache=False) for m in (reference, model))
    assert len(got.attentions) == 2
    assert got.attentions[0] is None
    assert_close(wanted.attentions[1], got.attentions[1], "attentions of the second stage")


def test_captured_outputs_with_checkpointing(pool):
    pool.run(_checkpointed, world=2)


def _checkpointed() -> None:
    reference = build(attn_implementation="eager")
    model = shard(copy.deepcopy(reference))
    for m in (reference, model):
        checkpointing(m, {"use_reentrant": False})
    wanted, got = (m(**batch(m), **CAPTURE) for m in (reference, model))
    _compare(wanted, got, heads=4)
    for out in (wanted, got):
        (out.loss + _loss_over([*out.hidden_states])).backward()
    assert_same_gradients(reference, model)


def test_the_model_keeps_its_interface(pool):
    pool.run(_interface, world=2)


def _interface() -> None:
    import inspect

    reference = build()
    model = shard(copy.deepcopy(reference))
    assert isinstance(model, type(reference))
    assert type(model).__name__ == "LlamaForCausalLM"
    assert type(model.model).__name__ == "LlamaModel"
    assert inspect.signature(model.forward) == inspect.signature(reference.forward)
    assert inspect.signature(model.model.forward) == inspect.signature(reference.model.forward)
    assert model.can_generate()
    assert model.get_input_embeddings() is model.model.embed_tokens
    assert model.get_output_embeddings() is model.lm_head
    assert [type(layer).__name__ for layer in model.model.layers] == ["LlamaDecoderLayer"] * 2
    assert model.num_parameters() == reference.num_parameters()
    assert model.model.layers[0].self_attn.q_proj.out_features == 64
    assert isinstance(model.lm_head, torch.nn.Linear)
    assert isinstance(model.model.embed_tokens, torch.nn.Embedding)


class GathersNothing(LlamaPolicy):
    def decoder(self):
        return [rule for rule in super().decoder() if not str(rule).startswith("outputs(")]


def test_what_no_rule_gathers_is_refused(pool):
    pool.run(_refused, world=2)


def _refused() -> None:
    for sequence in (False, True):
        model = build(attn_implementation="eager")
        reference = copy.deepcopy(model)
        shardcore.shard(model, tp=2, policy=GathersNothing, enable_sequence_parallelism=sequence)
        for asked in (model, model.model):
            given = {name: value for name, value in batch(model).items() if asked is model or name != "labels"}
            with pytest.raises(NotSupportedError, match="would return attentions that are not whole"):
                asked(**given, output_attentions=True)
        if sequence:
            with pytest.raises(NotSupportedError, match=r"would return hidden_states .*tokens are split"):
                model(**batch(model), output_hidden_states=True)
            continue
        wanted, got = (m(**batch(m), output_hidden_states=True) for m in (reference, model))  # whole on every rank
        for mine, theirs in zip(wanted.hidden_states, got.hidden_states, strict=True):
            assert_close(mine, theirs, "hidden states")
