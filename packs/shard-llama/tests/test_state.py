"""State of a sharded Llama: names, state dicts, checkpoints over other numbers of ranks, copies."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from llama_cases import adamw, assert_no_empty_part, batch, build, compare_forward, loss_of, pair, shard, train_beside
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

import shardcore
from shardcore_testing.parity import assert_same_gradients, assert_same_parameters, equal_on_ranks

pytestmark = pytest.mark.newest

# Odd vocabulary, tied; shared KV heads; an intermediate size that divides by no number of ranks.
OPTIONS = {"vocab_size": 97, "tie_word_embeddings": True, "num_key_value_heads": 2}
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


@pytest.mark.parametrize("dp", [1, 2])
def test_names_are_those_of_the_unsharded_model(pool, dp):
    pool.run(_names, dp, world=4)


def _names(dp: int) -> None:
    for name in ("LlamaForCausalLM", "LlamaForSequenceClassification"):
        reference, model = pair(name, **OPTIONS, tp=4 // dp, dp=dp)
        assert_no_empty_part(model)
        for _ in range(2):  # H42: before and after a step
            for listed in ("named_parameters", "named_buffers", "named_modules"):
                assert [n for n, _ in getattr(model, listed)()] == [n for n, _ in getattr(reference, listed)()]
            wanted, got = reference.state_dict(), model.state_dict()
            assert list(wanted) == list(got)
            assert {n: t.shape for n, t in wanted.items()} == {n: t.shape for n, t in got.items()}
            assert all(isinstance(t, DTensor) for t in got.values())
            loss_of(model(**batch(model))).backward()
            adamw(model).step()


def _looked_at() -> None:
    reference, model = pair("LlamaForCausalLM", tp=2)
    wanted, got = ({name for name in dir(one) if hasattr(one, name)} for one in (reference, model))
    assert wanted <= got
    assert dict(inspect.getmembers(model))["tp_size"] is None
    assert not hasattr(model, "_ddp_params_and_buffers_to_ignore")
    assert model._is_accelerate_prepared is False


def test_who_looks_at_all_attributes_is_no_trainer(pool):
    pool.run(_looked_at, world=2)


# At tp 4 two ranks share each KV head.
SAVED = {"tp4": (4, {"tp": 4}), "tp2": (2, {"tp": 2}), "tp2-dp2": (4, {"tp": 2, "dp": 2})}
LOADED = {"tp4": (4, {"tp": 4}), "unsharded": (1, None), "tp2-dp2": (4, {"tp": 2, "dp": 2}), "tp2": (2, {"tp": 2})}


@pytest.mark.nightly
@pytest.mark.parametrize("source", SAVED)
def test_checkpoints_move_between_layouts(pool, source, tmp_path):
    # Saved in the middle of a training, the next step is the one that the unsharded model takes.
    world, how = SAVED[source]
    pool.run(_save, how, str(tmp_path), world=world)
    for world, how in LOADED.values():
        pool.run(_load, how, str(tmp_path), world=world)


def _made(how: dict | None, seed: int) -> tuple[Any, torch.optim.Optimizer]:
    model = build(seed=seed, **OPTIONS)
    if how is not None:
        shard(model, **how)
    return model, adamw(model)


def _train(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        model(**batch(model, step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _save(how: dict, folder: str) -> None:
    model, optimizer = _made(how, seed=0)
    _train(model, optimizer, range(2))
    states = get_state_dict(model, optimizer)
    dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=folder)


def _load(how: dict | None, folder: str) -> None:
    model, optimizer = _made(how, seed=1)
    states = get_state_dict(model, optimizer)
    into = {"model": states[0], "optimizer": states[1]}
    dcp.load(into, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=into["model"], optim_state_dict=into["optimizer"])
    reference, wanted = _made(None, seed=0)
    _train(reference, wanted, range(2))
    assert_same_parameters(reference, model)
    _train(reference, wanted, range(2, 4))
    _train(model, optimizer, range(2, 4))
    assert_same_parameters(reference, model)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_copies(pool):
    pool.run(_copies, world=2)


def _copies() -> None:
    reference, model = pair(**OPTIONS)
    model(**batch(model)).loss.backward()
    model.zero_grad()
    clone = copy.deepcopy(model)
    assert type(clone) is type(model)
    assert clone.lm_head.weight is clone.model.embed_tokens.weight
    mine = {id(p) for p in model.parameters()}
    assert not mine & {id(p) for p in clone.parameters()}
    train_beside(reference, clone, steps=2)
    # The original did not move, and its regions are its own.
    untouched = build(**OPTIONS)
    compare_forward(untouched, model, batch(model, 4))
    assert_same_gradients(untouched, model)
    # Neither did its random stream.
    before = shardcore.get_rng_state(model)["cpu"]
    shardcore.manual_seed(clone, 5)
    assert torch.equal(shardcore.get_rng_state(model)["cpu"], before)
    assert equal_on_ranks(before)
    for attempt in (pickle.dumps, lambda m: torch.save(m, "/dev/null")):
        with pytest.raises(shardcore.WrapError, match="cannot be pickled"):
            attempt(model)


def test_weights_of_one_rank(pool):
    pool.run(_sync, world=2)


def _sync() -> None:
    model = build(seed=dist.get_rank())
    with pytest.raises(shardcore.AgreementError, match=r"differ in the values of model\.embed_tokens\.weight"):
        shard(model)
    shard(model, tp=2, sync_from=1)
    reference = build(seed=1)
    assert_same_parameters(reference, model, 0.0)
    with pytest.raises(shardcore.AlreadyShardedError):
        shard(model)
    train_beside(reference, model, steps=1)
