"""The cross entropy of logits that are split over the vocabulary, beside torch's of whole ones."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shardcore.comm.collectives import chunk_bounds
from shardcore.errors import NotSupportedError
from shardcore.mesh.context import ShardContext
from shardcore.nn.loss.cross_entropy import Vocabulary, chunked_cross_entropy, split_cross_entropy
from shardcore.nn.loss.logits import LazyLogits, VocabParallelLogits
from shardcore_testing.parity import assert_close


def _vocabulary(size):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    start, stop = chunk_bounds(size, dist.get_world_size(), dist.get_rank())
    return Vocabulary(ShardContext.of(mesh), size, start), slice(start, stop)


def _random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _labels(count, words):
    return torch.randint(0, words, (count,), generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize(("world", "words"), [(2, 10), (3, 10), (4, 7)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_split(pool, world, words, smoothing):
    pool.run(_split, words, smoothing, world=world)


def _split(words, smoothing):
    vocabulary, mine = _vocabulary(words)
    # One token has logits whose exponentials overflow, and one whose all underflow.
    whole = _random(12, words) + torch.tensor([1000.0, -1000.0] + [0.0] * 10, dtype=torch.float64).unsqueeze(1)
    whole.requires_grad_()
    local = whole.detach()[:, mine].clone().requires_grad_()
    labels, weights = _labels(12, words), _random(12, seed=1)
    wanted = F.cross_entropy(whole, labels, reduction="none", label_smoothing=smoothing)
    got = split_cross_entropy(local, labels, vocabulary, smoothing)
    assert_close(wanted, got, "losses", 1e-12)
    (wanted * weights).sum().backward()
    (got * weights).sum().backward()
    assert_close(whole.grad[:, mine], local.grad, "gradient", 1e-12)


def test_sums_of_half_precision_are_single(pool):
    pool.run(_half, world=2)


def _half():
    words = 4100
    vocabulary, mine = _vocabulary(words)
    whole, labels = _random(5, words, dtype=torch.bfloat16), _labels(5, words)
    got = split_cross_entropy(whole[:, mine].contiguous(), labels, vocabulary)
    assert got.dtype == torch.float32
    assert_close(F.cross_entropy(whole.double(), labels, reduction="none"), got.double(), "losses", 1e-6)


def test_words_that_are_impossible(pool):
    pool.run(_impossible, world=2)


def _impossible():
    vocabulary, mine = _vocabulary(6)
    whole = _random(4, 6)
    whole[:, :3] = -torch.inf  # all that the first rank has
    labels = torch.tensor([3, 4, 5, 3])
    whole.requires_grad_()
    local = whole.detach()[:, mine].clone().requires_grad_()
    wanted = F.cross_entropy(whole, labels, reduction="none")
    got = split_cross_entropy(local, labels, vocabulary)
    assert_close(wanted, got, "losses", 1e-12)
    wanted.sum().backward()
    got.sum().backward()
    assert_close(whole.grad[:, mine], local.grad, "gradient", 1e-12)


@pytest.mark.parametrize("chunk", [1, 5, 100])
def test_chunks(pool, chunk):
    pool.run(_chunks, chunk, world=2)


def _chunks(chunk):
    words = 7
    vocabulary, _ = _vocabulary(words)
    tp = vocabulary.context.tp
    whole = [_random(12, 4), _random(words, 4, seed=1), _random(words, seed=2)]
    x = whole[0].clone().requires_grad_()
    weight, bias = (distribute_tensor(t, tp, [Shard(0)]).detach().requires_grad_() for t in whole[1:])
    for t in whole:
        t.requires_grad_()
    labels, weights = _labels(12, words), _random(12, seed=3)
    wanted = F.cross_entropy(F.linear(*whole), labels, reduction="none", label_smoothing=0.1)
    got = chunked_cross_entropy(x, weight, bias, labels, vocabulary, 0.1, chunk=chunk)
    assert_close(wanted, got, "losses", 1e-12)
    (wanted * weights).sum().backward()
    (got * weights).sum().backward()
    summand = x.grad.clone()
    dist.all_reduce(summand)  # as the region does at its entry
    assert_close(whole[0].grad, summand, "input gradient", 1e-12)
    for mine, theirs in zip(whole[1:], (weight, bias), strict=True):
        assert_close(mine.grad, theirs.grad.full_tensor(), "parameter gradient", 1e-12)


# What models do to logits before the loss, beside a bias of each word.
_CHANGES = {
    "bias": lambda logits, bias: torch.add(logits + bias, bias),
    "capped": lambda logits, bias: torch.tanh(torch.div(logits, 2.0) + bias) * 1.5,
    "capped by another name": lambda logits, bias: torch.nn.functional.tanh(logits + bias) * 1.5,
}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("change", _CHANGES)
def test_changed_logits(pool, change, world, lazy):
    pool.run(_changed, change, lazy, world=world)


def _split_logits(lazy, words, dtype=torch.float64):
    """Return what a head returns of x (3, 4, 5), x and its weight, and the weight of the whole head."""
    vocabulary, mine = _vocabulary(words)
    x, whole = _random(3, 4, 5, dtype=dtype), _random(words, 5, seed=1, dtype=dtype)
    x = x.requires_grad_()
    if lazy:
        weight = distribute_tensor(whole, vocabulary.context.tp, [Shard(0)]).detach().requires_grad_()
        return LazyLogits(x, vocabulary, SimpleNamespace(weight=weight, bias=None), 5), x, weight, whole
    weight = whole[mine].clone().requires_grad_()
    return VocabParallelLogits(F.linear(x, weight), vocabulary), x, weight, whole


def _changed(change, lazy):
    words, change = 10, _CHANGES[change]
    logits, x, weight, whole = _split_logits(lazy, words)
    bias, labels = _random(1, words, seed=2) * 3, _labels(12, words)
    exact, own = x.detach().clone().requires_grad_(), whole.requires_grad_()
    wanted = F.cross_entropy(change(F.linear(exact, own), bias).view(-1, words), labels, label_smoothing=0.1)
    got = F.cross_entropy(change(logits, bias).view(-1, words), labels, label_smoothing=0.1)
    assert_close(wanted, got, "loss", 1e-12)
    wanted.backward()
    got.backward()
    summand = x.grad.clone()
    dist.all_reduce(summand)
    assert_close(exact.grad, summand, "input gradient", 1e-12)
    theirs = weight.grad.full_tensor() if lazy else weight.grad
    mine = own.grad if lazy else own.grad[_vocabulary(words)[1]]
    assert_close(mine, theirs, "gradient of the weight", 1e-12)


def test_a_bias_wider_than_the_logits(pool):
    pool.run(_wide_bias, world=2)


def _wide_bias():
    words, bias = 10, _random(10, seed=2).float()
    losses = []
    for lazy in (False, True):
        logits, x, weight, _ = _split_logits(lazy, words, torch.bfloat16)
        loss = F.cross_entropy((logits + bias).view(-1, words), _labels(12, words))
        loss.backward()
        assert (x.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.bfloat16)
        losses.append(loss)
    assert_close(*losses, "loss", 1e-6)


@pytest.mark.parametrize("lazy", [False, True])
def test_what_is_not_added(pool, lazy):
    pool.run(_not_added, lazy, world=2)


def _not_added(lazy):
    logits, *_ = _split_logits(lazy, 10)
    for wrong in (1.0, _random(4, 1), _random(10).requires_grad_(), _random(5)):
        with pytest.raises(NotSupportedError, match="addition of"):
            logits + wrong
    if lazy:
        with pytest.raises(NotSupportedError, match="one bias for each token"):
            logits + _random(4, 10)


def test_gradients_of_half_precision_are_summed_in_single(pool):
    pool.run(_many_chunks, world=2)


def _many_chunks():
    words, tokens = 64, 2048
    vocabulary, _ = _vocabulary(words)
    tp = vocabulary.context.tp
    x, whole = _random(tokens, 16, dtype=torch.bfloat16) + 1, _random(words, 16, seed=1, dtype=torch.bfloat16)
    weight = distribute_tensor(whole, tp, [Shard(0)]).detach().requires_grad_()
    exact = whole.double().requires_grad_()
    labels = torch.zeros(tokens, dtype=torch.long)  # their gradients all point the same way
    F.cross_entropy(F.linear(x.double(), exact), labels, reduction="sum").backward()
    chunked_cross_entropy(x, weight, None, labels, vocabulary, chunk=8).sum().backward()
    assert weight.grad.dtype == torch.bfloat16
    error = (weight.grad.full_tensor().double() - exact.grad).norm() / exact.grad.norm()
    assert error < 0.005, error
