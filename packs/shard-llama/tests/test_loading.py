"""``load_state_dict`` of a sharded Llama: full tensors are split, parts of other ranks are refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from llama_cases import batch, build, pair, shard
from torch import nn
from torch.distributed.tensor import DTensor

import shardcore
from shardcore.comm.parts import check_parts
from shardcore.comm.strided import torch_lacks
from shardcore.nn import FusedColumnLinear
from shardcore_shardformer import Linear1D_Col
from shardcore_testing.parity import assert_same_gradients, assert_same_parameters
from shardcore_transformers.writing import Transport

# Odd vocabulary, tied; fewer KV heads than four ranks; an intermediate size that divides by no number of ranks.
OPTIONS = {"vocab_size": 97, "tie_word_embeddings": True, "num_key_value_heads": 2}
LAYOUTS = {
    "tp2": {"tp": 2},
    "tp4": {"tp": 4},
    "dp2": {"dp": 2},
    "tp2-dp2": {"tp": 2, "dp": 2},
    "replicas": {"tp": 2, "dp_replicate_size": 2, "dp_shard_size": 1},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_full_tensors_are_split(pool, layout):
    axes = LAYOUTS[layout]
    pool.run(_full_tensors, axes, world=2 if layout in ("tp2", "dp2") else 4)


def _full_tensors(axes: dict[str, int]) -> None:
    other = build(seed=5, **OPTIONS)
    model = shard(build(seed=1, **OPTIONS), **axes)
    before = dict(model.named_parameters())
    for call in range(2):
        state = other.state_dict()
        kept = dict(state)
        assert str(model.load_state_dict(state)) == "<All keys matched successfully>"
        assert state.keys() == kept.keys()
        assert all(state[name] is kept[name] for name in state)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        assert_same_parameters(other, model, 0.0)
        model(**batch(other)).loss.backward()  # the second time FSDP2 holds the root's parameters gathered
        if call == 0:
            other = build(seed=6, **OPTIONS)
            model.zero_grad()
    if "dp" not in axes and "dp_replicate_size" not in axes:
        other(**batch(other)).loss.backward()
        assert_same_gradients(other, model)
    assert dict(model.named_parameters()).keys() == before.keys()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model(**batch(other))
    part = build(seed=7, **OPTIONS)
    for path in ("lm_head", "model", "model.layers.1"):  # the first belongs to the root, which is gathered
        model.get_submodule(path).load_state_dict(part.get_submodule(path).state_dict())
    assert_same_parameters(part, model, 0.0)
    if axes.keys() == {"tp"}:  # FSDP2 refuses deepcopy
        copied = copy.deepcopy(model)
        copied.load_state_dict(other.state_dict())
        assert_same_parameters(other, copied, 0.0)
        assert_same_parameters(part, model, 0.0)


def test_what_does_not_fit_is_said_as_torch_does(pool):
    pool.run(_does_not_fit, world=2)


def _does_not_fit() -> None:
    reference, model = pair(**{**OPTIONS, "tie_word_embeddings": False})
    other = build(seed=5, **{**OPTIONS, "tie_word_embeddings": False})
    state = other.state_dict()
    del state["model.norm.weight"]
    state["extra"] = torch.zeros(1)
    state["lm_head.weight"] = torch.zeros(98, other.config.hidden_size)
    texts = []
    for candidate in (reference, model):
        with pytest.raises(RuntimeError) as caught:
            candidate.load_state_dict(state)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
    assert all(word in texts[1] for word in ("Missing key(s)", "Unexpected key(s)", "size mismatch for lm_head.weight"))
    state["lm_head.weight"] = other.state_dict()["lm_head.weight"]
    assert str(model.load_state_dict(state, strict=False)) == str(reference.load_state_dict(state, strict=False))
    assert_same_parameters(reference, model, 0.0)
    model.load_state_dict(other.state_dict(), assign=True)
    with pytest.raises(shardcore.WrapError, match="load_state_dict\\(assign=True\\)"):
        model(**batch(model))


def test_in_a_module_of_the_user(pool):
    pool.run(_in_a_module, world=2)


def _in_a_module() -> None:
    plain = nn.ModuleDict({"body": build(seed=3, **OPTIONS), "head": nn.Linear(3, 3)})
    module = nn.ModuleDict({"body": shard(build(**OPTIONS), tp=2), "head": nn.Linear(3, 3)})
    module.load_state_dict(plain.state_dict())
    assert_same_parameters(plain["body"], module["body"], 0.0)
    native = nn.Linear(6, 10)
    column = Linear1D_Col.from_native_module(nn.Linear(6, 10), dist.group.WORLD)
    column.load_state_dict(native.state_dict())
    assert torch.equal(column.weight.full_tensor(), native.weight)


@pytest.mark.skipif(torch_lacks() is not None, reason="fused linears need torch 2.12")
def test_a_fused_weight(pool):
    pool.run(_fused, world=2)


def _fused() -> None:
    native = nn.Linear(6, 18)  # three segments of six rows, of which a rank holds three separate runs
    fused = FusedColumnLinear.from_native_module(nn.Linear(6, 18), dist.group.WORLD, segments=3)
    fused.load_state_dict(native.state_dict())
    assert torch.equal(fused.weight.full_tensor(), native.weight)
    check_parts({"weight": fused.weight})
    transport = Transport({"weight": fused.weight}, writer=1)
    if dist.get_rank() == 1:
        assert torch.equal(transport.gather(["weight"], lambda: None)["weight"], native.weight)
    else:
        transport.send(["weight"])


@pytest.mark.parametrize("layout", ["tp2", "dp2"])
def test_the_part_of_another_rank_is_refused(pool, layout, tmp_path):
    pool.run(_others_part, LAYOUTS[layout], str(tmp_path), world=2)


def _others_part(axes: dict[str, int], folder: str) -> None:
    rank, sizes = dist.get_rank(), {**OPTIONS, "vocab_size": 96}
    model = shard(build(seed=5, **sizes), **axes)
    torch.save(model.state_dict(), Path(folder, f"{rank}.pt"))
    dist.barrier()
    target = shard(build(seed=1, **sizes), **axes)
    _load(target, folder, rank)  # one file for each rank is right
    assert_same_parameters(build(seed=5, **sizes), target, 0.0)
    target = shard(build(seed=1, **sizes), **axes)
    before = {name: parameter.to_local().clone() for name, parameter in target.named_parameters()}
    if rank == 0:
        _load(target, folder, 0)
    else:
        with pytest.raises(shardcore.WrapError, match=r"the part of the rank at \(0,\) .* this rank is at \(1,\)"):
            _load(target, folder, 0)
        for name, parameter in target.named_parameters():
            assert torch.equal(parameter.to_local(), before[name]), name


def _load(model: Any, folder: str, rank: int) -> None:
    state = torch.load(Path(folder, f"{rank}.pt"), weights_only=False)
    model.load_state_dict(state)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.weight", "lm_head.weight", "model.norm.weight"])
def test_data_that_is_assigned_is_not_ignored(pool, name):
    pool.run(_assigned, name, world=2)


def _assigned(name: str) -> None:
    model = shard(build(**OPTIONS), tp=2)
    parameter = model.get_parameter(name)
    before = parameter.full_tensor().clone()
    for value in (torch.ones(parameter.shape), torch.ones_like(parameter.data), parameter.data.half()):
        with pytest.raises(shardcore.NotSupportedError, match=r"\.data of a sharded tensor"):
            parameter.data = value
    assert torch.equal(parameter.full_tensor(), before)
    parameter.data = parameter.data  # the same memory
    parameter.data += 1.0
    assert torch.equal(parameter.full_tensor(), before + 1.0)
    model(**batch(model)).loss.backward()
    with pytest.raises(shardcore.NotSupportedError, match="Nothing was changed"):
        parameter.grad.data = torch.zeros_like(parameter.grad)
