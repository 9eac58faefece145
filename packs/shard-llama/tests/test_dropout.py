"""Dropout in a sharded Llama: right masks, right gradients, replicas that stay equal (H6, H19, H40).

With dropout a sharded model is compared with the unsharded one by recording the masks that it drew, putting those of
single heads together, and replaying them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from llama_cases import adamw, batch, build, compare_forward, loss_of, outputs_of, pair, shard, train_beside
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, distribute_tensor

import shardcore
from shardcore.comm.collectives import gather_from_tp
from shardcore.comm.dtensor_params import local_tensor
from shardcore_testing.parity import assert_close, assert_same_gradients, equal_on_ranks
from shardcore_testing.subject import checkpointing

CHECKPOINTS = {"none": None, "reentrant": {"use_reentrant": True}, "non-reentrant": {"use_reentrant": False}}


def _residual_dropout(module: nn.Module, args: Any, output: Any) -> Any:
    return F.dropout(output, 0.2, module.training)


def _with_dropout(**options: Any) -> Any:
    """Return a Llama with dropout on its attention weights, after each MLP and after each block."""
    model = build(attention_dropout=0.3, attn_implementation="eager", **options)
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(_residual_dropout)
        layer.register_forward_hook(_residual_dropout)
    return model.train()


@contextmanager
def _dropout_as(mask: Any) -> Iterator[None]:
    """Let every dropout multiply by ``mask(x, p)``."""
    original = F.dropout

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return x * mask(original, x, p) if training and p else x

    F.dropout = dropout
    try:
        yield
    finally:
        F.dropout = original


class _Recorder:
    def __init__(self) -> None:
        self.masks: list[Tensor] = []

    def __call__(self, original: Any, x: Tensor, p: float) -> Tensor:
        self.masks.append(original(torch.ones_like(x), p, True))
        return self.masks[-1]


@pytest.mark.nightly
@pytest.mark.parametrize("kind", CHECKPOINTS)
@pytest.mark.parametrize("kv", [4, 1])
def test_gradients_are_those_of_the_masks(pool, kind, kv):
    pool.run(_replayed, CHECKPOINTS[kind], kv, world=2)


def _replayed(kind: dict | None, kv: int) -> None:
    torch.manual_seed(1000 + dist.get_rank())
    reference = _with_dropout(num_key_value_heads=kv)
    model = copy.deepcopy(reference)
    if kind:
        checkpointing(model, kind)
    shard(model)
    channel = model.model.layers[0].self_attn.q_proj._shard_context.channel
    seen = []
    for seed in (0, 1):
        inputs = batch(reference, seed)
        recorder = _Recorder()
        with _dropout_as(recorder):
            out = model(**inputs)
            masks = list(recorder.masks)  # what a recomputation draws comes later
            out.loss.backward()
        assert len(masks) == 3 * 2
        for mask in masks:
            if mask.ndim == 4:  # attention weights: two of four heads here, others there
                assert mask.shape[1] == 2
                assert not equal_on_ranks(mask)
            else:
                assert equal_on_ranks(mask)
        replayed = iter([gather_from_tp(m, channel, 1, 4) if m.ndim == 4 else m for m in masks])
        with _dropout_as(lambda original, x, p, masks=replayed: next(masks)):
            wanted = reference(**inputs)
            wanted.loss.backward()
        assert next(replayed, None) is None
        assert_close(wanted.logits, out.logits, "logits")
        assert equal_on_ranks(out.logits)
        seen += masks
    assert_same_gradients(reference, model)
    heads = [mask for mask in seen if mask.ndim == 4]
    assert not any(torch.equal(a, b) for i, a in enumerate(heads) for b in heads[:i])  # every layer and step anew


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_directional_derivative(pool, kind):
    pool.run(_directional, CHECKPOINTS[kind], world=4)


@contextmanager
def _only_float64() -> Iterator[None]:
    """Keep transformers from computing norms and softmax in float32, where finite differences drown."""
    to, softmax = torch.Tensor.to, F.softmax
    torch.Tensor.to = lambda x, *args, **kwargs: x if args == (torch.float32,) else to(x, *args, **kwargs)
    F.softmax = lambda x, dim, dtype=None: softmax(x, dim)
    try:
        yield
    finally:
        torch.Tensor.to, F.softmax = to, softmax


def _directional(kind: dict | None) -> None:
    torch.manual_seed(dist.get_rank())
    model = _with_dropout(num_key_value_heads=2)
    generator = torch.Generator().manual_seed(3)
    directions = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in model.parameters()]
    if kind:
        checkpointing(model, kind)
    shard(model)
    # No padding: its row of the embedding has no gradient, though the outputs depend on it.
    inputs = {"input_ids": batch(model, pads=(0,))["input_ids"]}
    state = shardcore.get_rng_state(model)

    def value() -> Tensor:
        shardcore.set_rng_state(model, state)
        return model(**inputs).logits.square().mean()

    pairs = list(zip(model.parameters(), directions, strict=True))
    moves = [distribute_tensor(v, p.device_mesh, p.placements) for p, v in pairs]
    with _only_float64():
        value().backward()
        slope = sum((p.grad.full_tensor() * v).sum() for p, v in pairs).item()
        checkpointing(model, None)
        step, values = 1e-6, []
        for distance in (step, -2 * step):
            with torch.no_grad():
                for parameter, move in zip(model.parameters(), moves, strict=True):
                    parameter.add_(move, alpha=distance)
                values.append(value().item())
    measured = (values[0] - values[1]) / (2 * step)
    assert abs(slope - measured) <= 1e-7 * abs(slope), (slope, measured)


@pytest.mark.nightly
def test_replicas_do_not_drift(pool):
    pool.run(_drift, world=2)


def _drift() -> None:
    torch.manual_seed(50 * dist.get_rank())
    model = shard(_with_dropout(num_key_value_heads=1))
    optimizer = adamw(model)
    for step in range(20):
        model(**batch(model, step)).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    compared = 0
    for name, parameter in model.named_parameters():
        if parameter.placements == (Replicate(),):
            assert equal_on_ranks(local_tensor(parameter)), f"{name} has drifted"
            compared += 1
    assert compared >= 2 * (2 + 2) + 1  # norms, two biases of row linears; the last norm


def test_one_seed_gives_one_run(pool):
    pool.run(_reproducible, world=2)


def _reproducible() -> None:
    torch.manual_seed(dist.get_rank())
    model = shard(_with_dropout())
    users = torch.get_rng_state()
    shardcore.manual_seed(model, 3)
    losses = [model(**batch(model)).loss.item() for _ in range(2)]
    state = shardcore.get_rng_state(model)
    later = model(**batch(model)).loss.item()
    shardcore.manual_seed(model, 3)
    assert [model(**batch(model)).loss.item() for _ in range(2)] == losses
    shardcore.set_rng_state(model, state)
    assert model(**batch(model)).loss.item() == later
    assert len({*losses, later}) == 3
    assert torch.equal(torch.get_rng_state(), users)
    model.eval()
    assert model(**batch(model)).loss.item() == model(**batch(model)).loss.item()
    assert equal_on_ranks(torch.tensor(losses))


def test_the_classifiers_dropout(pool):
    pool.run(_classifier, world=2)


def _classifier() -> None:
    torch.manual_seed(dist.get_rank())
    # Its default is 0.1, and no dropout lies in a region: an unsharded model on the same stream draws the same masks.
    reference, model = pair("LlamaForTokenClassification", num_labels=3)
    assert reference.dropout.p == 0.1
    shardcore.manual_seed(model, 5)
    for seed in range(3):
        inputs = batch(reference, seed)
        state = shardcore.get_rng_state(model)["cpu"]
        got = model(**inputs)
        got.loss.backward()
        with torch.random.fork_rng():
            torch.set_rng_state(state)
            wanted = reference(**inputs)
            wanted.loss.backward()
        for name, tensor in outputs_of(wanted).items():
            assert_close(tensor, got[name], name)
    assert not torch.equal(loss_of(wanted), reference(**inputs).loss)
    assert_same_gradients(reference, model)
    reference.eval()
    model.eval()
    compare_forward(reference, model, batch(reference, 9))


def test_training_without_dropout_after_training_with_it(pool):
    pool.run(_off, world=2)


def _off() -> None:
    reference = build(attention_dropout=0.3, attn_implementation="eager")
    model = shard(copy.deepcopy(reference))
    model(**batch(model)).loss.backward()
    model.zero_grad()
    for m in (reference, model):
        for layer in m.model.layers:
            layer.self_attn.attention_dropout = 0.0
    train_beside(reference, model, steps=1)
