"""Captured outputs of both stacks, the weighted sum of layers, precision, and six heads."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from whisper_cases import build, compare, inputs, pair, shard

from shardcore_testing.parity import assert_close, assert_same_gradients

CAPTURE = {"output_attentions": True, "output_hidden_states": True}
STACKS = (
    "decoder_attentions",
    "decoder_hidden_states",
    "cross_attentions",
    "encoder_attentions",
    "encoder_hidden_states",
)
CASES = {
    "WhisperForConditionalGeneration": STACKS,
    "WhisperModel": STACKS,
    "WhisperForCausalLM": ("attentions", "hidden_states", "cross_attentions"),
    "WhisperForAudioClassification": ("attentions", "hidden_states"),
}


def _flat(values: Any) -> list[Tensor]:
    return [t for v in values for t in (_flat(v) if isinstance(v, tuple) else [v]) if isinstance(t, Tensor)]


def _weighted(tensors: list[Tensor]) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return sum((t * torch.randn(t.shape, generator=generator, dtype=t.dtype)).sum() for t in tensors)


@pytest.mark.nightly
@pytest.mark.parametrize("captured_before", [False, True], ids=["fresh", "captured-before"])
@pytest.mark.parametrize("name", CASES)
def test_captured_outputs_are_whole_and_differentiable(pool, name, captured_before):
    pool.run(_captured, name, captured_before, world=2)


def _captured(name: str, captured_before: bool) -> None:
    reference = build(name, attn_implementation="eager").double().train()
    model = copy.deepcopy(reference)
    batch = inputs(reference, 0)
    if captured_before:  # transformers 5 installs its capturing hooks at the first use
        model(**batch, **CAPTURE)
    shard(model)
    wanted, got = (m(**batch, **CAPTURE) for m in (reference, model))
    for kind in CASES[name]:
        assert len(wanted[kind]) == len(got[kind]) == 2 + ("hidden" in kind)
        for i, (mine, theirs) in enumerate(zip(wanted[kind], got[kind], strict=True)):
            assert_close(mine, theirs, f"{kind}[{i}]")
    for out in (wanted, got):
        _weighted(_flat(out[kind] for kind in CASES[name])).backward()
    assert_same_gradients(reference, model)
    wanted, got = (m(**batch, **CAPTURE, return_dict=False) for m in (reference, model))
    assert isinstance(got, tuple)
    for mine, theirs in zip(_flat(wanted), _flat(got), strict=True):
        assert_close(mine, theirs, "tuple")
    assert model(**batch).get(CASES[name][0]) is None


def test_weighted_layers(pool):
    pool.run(_weighted_layers, world=2)


def _weighted_layers() -> None:
    for labels, kind in ((3, "sdpa"), (10, "eager")):
        options = {"use_weighted_layer_sum": True, "num_labels": labels, "attn_implementation": kind}
        reference, model = pair("WhisperForAudioClassification", **options)
        compare(reference, model)
        assert_same_gradients(reference, model)
        assert model.layer_weights.grad.to_local().abs().max() > 0
        batch = inputs(reference, 2)
        wanted, got = (m(**batch, output_attentions=kind == "eager") for m in (reference, model))
        assert [t.shape for t in _flat(wanted.values())] == [t.shape for t in _flat(got.values())]


def test_six_heads_on_three_ranks(pool):
    pool.run(_six, world=3)
    pool.run(_six, world=2)


def _six() -> None:
    six = {"d_model": 48, "encoder_attention_heads": 6, "decoder_attention_heads": 6}
    for name in CASES:
        reference, model = pair(name, **six)
        compare(reference, model)
        assert_same_gradients(reference, model)


def test_names_of_what_has_no_bias(pool):
    pool.run(_biases, world=2)


def _biases() -> None:
    reference, model = pair("WhisperForConditionalGeneration")
    names = {name for name, _ in model.named_parameters()}
    assert names == {name for name, _ in reference.named_parameters()}
    for stack, kinds in (("encoder", ("self_attn",)), ("decoder", ("self_attn", "encoder_attn"))):
        for kind in kinds:
            biases = [p for p in "qkv" if f"model.{stack}.layers.0.{kind}.{p}_proj.bias" in names]
            assert biases == ["q", "v"]
    assert model.proj_out.weight is model.model.decoder.embed_tokens.weight
    assert not model.model.encoder.embed_positions.weight.requires_grad


def test_bfloat16(pool):
    pool.run(_bfloat16, world=2)


def _bfloat16() -> None:
    for name in ("WhisperForConditionalGeneration", "WhisperForAudioClassification"):
        reference = build(name).to(torch.bfloat16)
        model = shard(copy.deepcopy(reference))
        compare(reference, model, tolerance=0.05)
        learnt = [p for p in model.parameters() if p.requires_grad]
        assert {p.grad.dtype for p in learnt} == {torch.bfloat16}
        assert_same_gradients(reference, model, 0.05)
