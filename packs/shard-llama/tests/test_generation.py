"""Generation with a sharded Llama: the same tokens, local caches, one random stream (H18, H40)."""

from __future__ import annotations

import copy
import dataclasses
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from llama_cases import batch, build, shard, train_beside
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions

import shardcore
from shardcore.errors import NotSupportedError
from shardcore_testing.parity import equal_on_ranks

GREEDY = {"max_new_tokens": 7, "do_sample": False}
# What outputs and calls of this release of transformers call a cache; 5.24 has renamed it.
_CACHE = (
    "cache"
    if "cache" in {field.name for field in dataclasses.fields(CausalLMOutputWithCrossAttentions)}
    else "past_key_values"
)
STATIC = {"cache_implementation": "static", "disable_compile": True}


def _prompt(padded: bool) -> dict[str, Tensor]:
    ids = torch.randint(2, 101, (2, 6), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    if padded:
        ids[1, :3], mask[1, :3] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def _twins(**options: Any) -> tuple[Any, Any]:
    reference = build(**options).eval()
    reference.generation_config.pad_token_id = 0
    return reference, shard(copy.deepcopy(reference))


@pytest.mark.parametrize("kv", [4, 1])
def test_greedy_tokens_are_equal(pool, kv):
    pool.run(_greedy, kv, world=4)


def _greedy(kv: int) -> None:
    for kind in ("sdpa", "eager"):
        reference, model = _twins(num_key_value_heads=kv, attn_implementation=kind)
        for padded in (False, True):
            prompt = _prompt(padded)
            wanted = reference.generate(**prompt, **GREEDY, use_cache=True)
            for way in ({"use_cache": True}, {"use_cache": False}, {"use_cache": True, **STATIC}):
                torch.testing.assert_close(model.generate(**prompt, **GREEDY, **way), wanted, rtol=0, atol=0)
    assert wanted.shape == (2, 13)
    assert len(wanted.unique()) > 5  # a model that repeats one token would prove little


@pytest.mark.parametrize(("kv", "local"), [(4, 2), (2, 1), (1, 1)])
def test_caches_hold_local_heads(pool, kv, local):
    shapes = pool.run(_cache_shapes, kv, world=2)
    # The last token of the answer was never fed back: 6 + 7 - 1 positions, or all of a static cache.
    dynamic, static = (2, local, 12, 16), (2, local, 13, 16)
    for rank in shapes:
        assert rank[0] == [dynamic] * 2
        assert [shape[:2] for shape in rank[1]] == [static[:2]] * 2


def _cache_shapes(kv: int) -> list[list[tuple[int, ...]]]:
    _, model = _twins(num_key_value_heads=kv)
    shapes = []
    for way in ({}, STATIC):
        out = model.generate(**_prompt(False), **GREEDY, use_cache=True, return_dict_in_generate=True, **way)
        shapes.append([tuple(layer.keys.shape) for layer in getattr(out, _CACHE).layers])
    return shapes


def test_sampling_and_beams_agree_however_ranks_are_seeded(pool):
    pool.run(_sampling, world=4)


def _sampling() -> None:
    torch.manual_seed(100 + dist.get_rank())
    reference, model = _twins()
    prompt = _prompt(True)
    sample = {"max_new_tokens": 8, "do_sample": True, "top_k": 0, "temperature": 2.0, "use_cache": True}
    users = torch.get_rng_state()
    for way in (sample, {**sample, "num_beams": 3}, {**sample, "num_return_sequences": 2, **STATIC}):
        shardcore.manual_seed(model, 11)
        state = shardcore.get_rng_state(model)["cpu"]
        first, second = model.generate(**prompt, **way), model.generate(**prompt, **way)
        assert equal_on_ranks(first)
        assert equal_on_ranks(second)
        assert not torch.equal(first, second)
        shardcore.manual_seed(model, 11)
        assert torch.equal(model.generate(**prompt, **way), first)
        assert torch.equal(torch.get_rng_state(), users)  # the user's own numbers are untouched
        with torch.random.fork_rng():
            torch.set_rng_state(state)
            assert torch.equal(reference.generate(**prompt, **way), first)
    beams = {**GREEDY, "num_beams": 3, "use_cache": True}
    assert torch.equal(model.generate(**prompt, **beams), reference.generate(**prompt, **beams))


@pytest.mark.nightly
def test_generation_between_training_steps(pool):
    pool.run(_between, world=2)


def _between() -> None:
    reference, model = _twins(vocab_size=97, tie_word_embeddings=True)
    prompt = {name: ids.clamp(max=96) for name, ids in _prompt(True).items()}
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            wanted = reference.generate(**prompt, **GREEDY, use_cache=True)
            assert torch.equal(model.generate(**prompt, **GREEDY, use_cache=True), wanted)
            assert torch.allclose(reference(**prompt).logits, model(**prompt).logits, rtol=0, atol=1e-10)
        reference.train()
        model.train()
        train_beside(reference, model, steps=1)
        # In training mode generation works too, and sees the new weights.
        assert torch.equal(model.generate(**prompt, **GREEDY), reference.generate(**prompt, **GREEDY))
        reference.eval()
        model.eval()
    assert not torch.equal(wanted, reference.generate(**prompt, **GREEDY))


def test_a_cache_that_the_caller_holds(pool):
    pool.run(_own_cache, world=2)


def _own_cache() -> None:
    reference, model = _twins(num_key_value_heads=2)
    ids = batch(reference, pads=(0,))["input_ids"]
    with torch.no_grad():
        wanted = reference(input_ids=ids).logits
        first = model(input_ids=ids[:, :5], use_cache=True)
        second = model(input_ids=ids[:, 5:], use_cache=True, **{_CACHE: getattr(first, _CACHE)})
    torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), wanted, rtol=1e-9, atol=1e-9)


def test_the_clock_of_one_rank_ends_a_generation(pool):
    lengths = pool.run(_in_time, world=2)
    assert lengths[0] == lengths[1]


def _in_time() -> list[int]:
    _, model = _twins(max_position_embeddings=4096)
    prompt, rank = _prompt(padded=False), dist.get_rank()
    way = {"max_new_tokens": 40, "do_sample": False, "use_cache": True}
    # The first rank's clock says that it is over after three tokens, the other's that it never is; and the other way.
    found = []
    for over in (0, 1):
        clock = iter([0.0] * 4 + [100.0] * 100) if rank == over else iter([0.0] * 200)
        criteria = transformers.generation.stopping_criteria
        real, criteria.time = criteria.time, SimpleNamespace(time=lambda clock=clock: next(clock))
        try:
            found.append(model.generate(**prompt, **way, max_time=1.0).shape[1])
        finally:
            criteria.time = real
    assert found[0] == 6 + 4
    assert found[1] == 6 + 40  # the clock of another rank changes nothing
    return found


@pytest.mark.parametrize("every", [100, 0], ids=["inputs are compared", "they are not"])
def test_two_threads_at_once(pool, every):
    pool.run(_threads, every, world=2)


def _threads(every: int) -> None:
    model = shard(build().eval(), check_inputs_every=every)
    model.generation_config.pad_token_id = 0
    prompt = _prompt(padded=False)
    errors: list[Any] = []

    def other() -> None:
        for call in (lambda: model.generate(**prompt, **GREEDY), lambda: model(**prompt)):
            try:
                call()
            except Exception as error:
                errors.append(error)

    def meanwhile(*args: Any) -> None:
        if not errors:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()

    handle = model.model.layers[0].register_forward_hook(meanwhile)
    first = model.generate(**prompt, **GREEDY)
    handle.remove()
    assert [type(error) for error in errors] == [shardcore.NotSupportedError] * 2
    assert "two threads call one sharded model" in str(errors[0])
    thread = threading.Thread(target=lambda: errors.append(model.generate(**prompt, **GREEDY)))  # alone it may
    thread.start()
    thread.join()
    assert torch.equal(errors[2], first)


def _batched():
    _, model = _twins()
    with pytest.raises(NotSupportedError, match="the heads of the whole model"):
        model.generate_batch([[3, 4, 5], [6, 7]])


@pytest.mark.newest
def test_continuous_batching_is_refused(pool):
    """Its thread would swallow what its cache says of local heads, and every answer would be empty."""
    pool.run(_batched)
