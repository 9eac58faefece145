"""Generation of a Whisper that has learnt to listen: the same tokens, local caches, new weights (H18, H37)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from whisper_cases import shard, speech

import shardcore
from shardcore_testing.parity import assert_close, assert_same_gradients, assert_same_parameters, equal_on_ranks

GREEDY = {"max_new_tokens": 8, "do_sample": False}
STATIC = {"cache_implementation": "static", "disable_compile": True}
WAYS: dict[str, dict[str, Any]] = {
    "cache": {"use_cache": True},
    "no-cache": {"use_cache": False},
    "static-cache": {"use_cache": True, **STATIC},
    "beams": {"use_cache": True, "num_beams": 3},
    "beams-static-cache": {"use_cache": True, "num_beams": 2, **STATIC},
}


def _twins(folder: str) -> tuple[Any, Any]:
    reference = transformers.WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float64).eval()
    return reference, shard(copy.deepcopy(reference))


def _tokens(out: Any) -> Tensor:
    return out if isinstance(out, Tensor) else out["sequences"]


@pytest.mark.parametrize("way", WAYS)
def test_the_same_tokens(pool, listener, way):
    pool.run(_same, listener, WAYS[way], world=2)


def _same(folder: str, way: dict[str, Any]) -> None:
    reference, model = _twins(folder)
    features, spelled = speech(12, 7, torch.float64)
    wanted = reference.generate(input_features=features, **GREEDY, **way)
    got = model.generate(input_features=features, **GREEDY, **way)
    assert torch.equal(_tokens(wanted), _tokens(got))
    said = [[token for token in row if token > 2] for row in _tokens(got).tolist()]
    right = sum(heard == row for heard, row in zip(said, spelled.tolist(), strict=True))
    assert right >= 9  # the model listens: its answers are neither repetitive nor alike
    assert len({tuple(row) for row in said}) == len(said)


def test_caches_hold_local_heads(pool, listener):
    for static in (False, True):
        for shapes in pool.run(_caches, listener, static, world=2):
            assert {kind: [shape[:2] for shape in of_kind] for kind, of_kind in shapes.items()} == {
                "self_attention_cache": [(2, 4)] * 2,  # of eight heads
                "cross_attention_cache": [(2, 4)] * 2,
            }
            assert all(shape[2:] == (11, 8) for shape in shapes["cross_attention_cache"])


def _caches(folder: str, static: bool) -> dict[str, list[tuple[int, ...]]]:
    _, model = _twins(folder)
    seen: list[Any] = []
    # What generate returns is taken apart by row in some releases: the caches are looked at where they are used.
    attention = model.model.decoder.layers[0].self_attn
    attention.register_forward_pre_hook(lambda _, *call: seen.append(_cache(*call)), with_kwargs=True)
    features, _ = speech(2, 7, torch.float64)
    model.generate(input_features=features, **GREEDY, use_cache=True, **(STATIC if static else {}))
    kinds = ("self_attention_cache", "cross_attention_cache")
    return {kind: [tuple(layer.keys.shape) for layer in getattr(seen[-1], kind).layers] for kind in kinds}


def _cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return next(v for v in (*args, *kwargs.values()) if isinstance(v, transformers.EncoderDecoderCache))


def test_sampling_agrees_however_ranks_are_seeded(pool, listener):
    pool.run(_sampling, listener, world=2)


def _sampling(folder: str) -> None:
    torch.manual_seed(100 + dist.get_rank())
    reference, model = _twins(folder)
    features, _ = speech(4, 9, torch.float64)
    way = {"input_features": features, "max_new_tokens": 8, "do_sample": True, "temperature": 3.0, "top_k": 0}
    users = torch.get_rng_state()
    shardcore.manual_seed(model, 11)
    state = shardcore.get_rng_state(model)["cpu"]
    first, second = (_tokens(model.generate(**way)) for _ in range(2))
    assert equal_on_ranks(first)
    assert equal_on_ranks(second)
    assert first.shape != second.shape or not torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), users)
    with torch.random.fork_rng():
        torch.set_rng_state(state)
        assert torch.equal(_tokens(reference.generate(**way)), first)


def test_times_of_tokens(pool, listener):
    # They are read off the cross-attentions of single heads, which lie on different ranks.
    pool.run(_times, listener, world=2)


def _times(folder: str) -> None:
    reference, model = _twins(folder)
    for m in (reference, model):
        m.set_attn_implementation("eager")
        m.generation_config.alignment_heads = [[0, 1], [1, 6]]
        m.generation_config.no_timestamps_token_id = 90
    features, _ = speech(4, 7, torch.float64)
    mask = torch.ones(4, 22, dtype=torch.long)
    way = {"return_token_timestamps": True, "attention_mask": mask, "return_dict_in_generate": True, **GREEDY}
    wanted, got = (m.generate(input_features=features, **way) for m in (reference, model))
    assert torch.equal(wanted["sequences"], got["sequences"])
    assert torch.equal(wanted["token_timestamps"], got["token_timestamps"])
    assert len(wanted["cross_attentions"]) == len(got["cross_attentions"]) > 4  # tokens
    for mine, theirs in zip(wanted["cross_attentions"], got["cross_attentions"], strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert a.shape[1] == 8
            assert_close(a, b, "cross-attentions of a token")


@pytest.mark.nightly
def test_generation_between_training_steps(pool, listener):
    pool.run(_between, listener, world=2)


def _between(folder: str) -> None:
    reference, model = _twins(folder)
    optimizers = [
        torch.optim.AdamW(m.parameters(), lr=3e-2, eps=1e-5) for m in (reference, model)
    ]  # far above rounding
    features, tokens = speech(8, 7, torch.float64)
    answers = []
    for step in range(3):
        for mode in ("train", "eval"):
            both = [getattr(m, mode)() for m in (reference, model)]
            wanted, got = (_tokens(m.generate(input_features=features, **GREEDY)) for m in both)
            assert torch.equal(wanted, got)
        answers.append(got)
        losses = [m.train()(input_features=features, labels=tokens.roll(1, 1)).loss for m in (reference, model)]
        assert_close(losses[0], losses[1], f"loss {step}")
        for loss in losses:
            loss.backward()
        assert_same_gradients(reference, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_parameters(reference, model)
        assert model.proj_out.weight is model.model.decoder.embed_tokens.weight
    assert answers[0].shape != answers[-1].shape or not torch.equal(answers[0], answers[-1])


def test_what_was_learnt_is_saved(pool, listener, tmp_path):
    pool.run(_saved, listener, str(tmp_path), world=2)
    again = transformers.WhisperForConditionalGeneration.from_pretrained(tmp_path)
    features, spelled = speech(12, 7)
    tokens = _tokens(again.generate(input_features=features, **GREEDY)).tolist()
    said = [[token for token in row if token > 2] for row in tokens]
    assert sum(heard == row for heard, row in zip(said, spelled.tolist(), strict=True)) >= 9


def _saved(folder: str, target: str) -> None:
    _, model = _twins(folder)
    model.float().save_pretrained(target)
