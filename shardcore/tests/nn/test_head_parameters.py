"""Parameters of local heads and channels, parameters that all heads read, and parameters that other modules read."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from blocks import Net
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.utils.checkpoint import checkpoint

import shardcore
from shardcore import Policy
from shardcore.errors import WrapError
from shardcore.styles import by_heads, norm, partial, region, replicate, sequence, vocab
from shardcore_testing.parity import assert_close, assert_same_gradients

WIDTH, INNER = 8, 10  # 10 channels: 4, 4 and 2 on three ranks
SEQUENCE = {"enable_sequence_parallelism": True}
DEFERRED = {"partial_gradients": "deferred"}


class Mixer(nn.Module):
    """Channels with parameters of every form; it computes one of its convolutions itself, as Mamba's mixer does."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.decay, self.gain = nn.Parameter(torch.randn(INNER, 3)), nn.Parameter(torch.randn(2, 1, INNER))
        self.shift, self.all = nn.Embedding(3, INNER), nn.Parameter(torch.randn(1))
        self.filter = nn.Linear(1, INNER)
        self.scales = nn.ParameterList([torch.randn(INNER), torch.randn(INNER)])

    def forward(self, x):
        x = self.up(x) * self.decay.exp().sum(-1) + self.shift(torch.arange(3)).sum(0)
        x = (x * self.gain.sum((0, 1)) + self.all).tanh() * self.filter.weight[:, 0] + self.filter.bias
        return self.down(x * self.scales[0] + self.scales[1])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mixer, self.gamma = nn.LayerNorm(WIDTH), Mixer(), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return x + self.mixer(F.layer_norm(x, (WIDTH,), self.norm.weight, self.norm.bias)) * self.gamma


class MixerPolicy(Policy):
    def module_policy(self):
        return {
            "Net": [norm("norm"), sequence(scatter="blocks[0]", gather="norm")],
            "Block": [norm("norm"), replicate("gamma"), region(enter="mixer", col="mixer.up", row="mixer.down")],
            "Mixer": [
                partial("all"),  # the rules after it name other parameters of the same module
                by_heads("decay", "filter", "scales"),
                by_heads("gain", "shift", dim=-1),
            ],
        }


def mixers():
    torch.manual_seed(0)
    return Net(WIDTH, [Block() for _ in range(2)]).double()


def _compare(native, sharded, x):
    outs = [model(x) for model in (native, sharded)]
    assert_close(*outs, "output")
    for out in outs:
        out.cos().sum().backward()
    shardcore.reduce_partial_gradients(sharded)
    assert_same_gradients(native, sharded)


def parity(tp, fields):
    native, x = mixers(), torch.randn(2, 7, WIDTH, dtype=torch.float64)
    sharded = shardcore.shard(copy.deepcopy(native), policy=MixerPolicy, tp=tp, **fields)
    widths = {name: p.to_local().shape for name, p in sharded.named_parameters() if "mixer" in name}
    local = sharded.blocks[0].mixer.up.weight.to_local().size(0)
    shapes = {"decay": (local, 3), "gain": (2, 1, local), "shift.weight": (3, local), "scales.1": (local,)}
    for name, shape in shapes.items():
        assert widths[f"blocks.0.mixer.{name}"] == shape
    _compare(native, sharded, x)
    _compare(native, sharded, x)  # accumulates


@pytest.mark.parametrize("fields", [{}, SEQUENCE, DEFERRED, SEQUENCE | DEFERRED], ids=str)
def test_every_gradient_is_that_of_the_unsharded_model(pool, fields):
    pool.run(parity, 2, fields, world=2)


def test_channels_are_cut_as_columns_are(pool):
    pool.run(parity, 3, {}, world=3)


def replaced():
    native = mixers()
    sharded = shardcore.shard(copy.deepcopy(native), policy=MixerPolicy, tp=2)
    for name in ("decay", "gain", "shift.weight"):
        given = {f"blocks.0.mixer.{name}": native.blocks[0].mixer.get_parameter(name)}
        with pytest.raises(WrapError, match="functional_call with whole tensors"):
            torch.func.functional_call(sharded, given, (torch.randn(2, 7, WIDTH, dtype=torch.float64),))


def test_whole_tensors_in_their_place_are_refused(pool):
    pool.run(replaced, world=2)


def saved():
    native, other = mixers(), mixers()
    sharded = shardcore.shard(copy.deepcopy(native), policy=MixerPolicy, tp=2)
    state = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True))
    for name, wanted in native.state_dict().items() if state else ():
        assert torch.equal(state[name], wanted), name
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(torch.randn_like(parameter))
    sharded.load_state_dict(other.state_dict())
    _compare(other, sharded, torch.randn(2, 7, WIDTH, dtype=torch.float64))


def test_saving_and_loading_whole_tensors(pool):
    pool.run(saved, world=2)


def recomputed(reentrant):
    native, x = mixers(), torch.randn(2, 7, WIDTH, dtype=torch.float64)
    sharded = shardcore.shard(copy.deepcopy(native), policy=MixerPolicy, tp=2)
    for model in (native, sharded):
        for block in model.blocks:
            inner = block.forward
            block.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=reentrant)
    _compare(native, sharded, x.requires_grad_())


@pytest.mark.parametrize("reentrant", [False, True])
def test_blocks_that_read_others_parameters_are_recomputed(pool, reentrant):
    pool.run(recomputed, reentrant, world=2)


class Conv(nn.Module):
    def __init__(self, groups=8):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.conv = nn.Conv1d(16, 16, 3, groups=groups, padding=1)

    def forward(self, x):
        return self.down(self.conv(self.up(x).mT).mT)


class ConvPolicy(Policy):
    def module_policy(self):
        return {
            "Net": [norm("norm")],
            "Conv": [region(enter="", col="up", row="down"), by_heads("conv")],
        }


def convolved():
    torch.manual_seed(0)
    native = Net(WIDTH, [Conv(groups) for groups in (8, 16, 2)]).double()
    sharded = shardcore.shard(copy.deepcopy(native), policy=ConvPolicy, tp=2)
    assert [block.conv.groups for block in sharded.blocks] == [4, 8, 1]
    _compare(native, sharded, torch.randn(2, 7, WIDTH, dtype=torch.float64))


def test_a_convolution_of_local_channels(pool):
    pool.run(convolved, world=2)


class Reader(nn.Module):
    """Multiplies by the transposed table of an embedding, in a method."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(13, WIDTH)
        self.config = None

    def forward(self, ids):
        return self.scores(self.table(ids))

    def scores(self, x):
        return x @ self.table.weight.mT


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Reader()

    def forward(self, ids):
        return self.inner(ids)


def _reader(rule):
    class Given(Policy):
        def module_policy(self):
            return {"Reader": [rule]}

    torch.manual_seed(0)
    native = Outer().double()
    return native, shardcore.shard(copy.deepcopy(native), policy=Given, tp=2)


def read():
    native, sharded = _reader(replicate("table"))
    ids = torch.arange(5)
    _compare(native, sharded, ids)
    table = sharded.inner.table
    assert table.weight is table._parameters["weight"], "outside of a call it is the DTensor"
    with torch.no_grad():
        assert_close(native(ids), sharded(ids), "output")


def test_a_replicated_parameter_is_local_to_whoever_reads_it(pool):
    pool.run(read, world=2)


def forgotten():
    _, sharded = _reader(replicate("table"))
    kept = []
    sharded.inner.table.register_forward_hook(lambda module, args, out: kept.append(weakref.ref(out)))
    gc.collect()
    gc.disable()
    try:
        with torch.no_grad():
            sharded(torch.arange(5))
        assert [found() for found in kept] == [None]
    finally:
        gc.enable()


def test_what_a_reader_computes_with_does_not_wait_for_the_collector(pool):
    pool.run(forgotten, world=2)


class Sum(nn.Module):
    """Adds two tables first: both get the same gradient."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Embedding(7, WIDTH), nn.Embedding(7, WIDTH)

    def forward(self, x):
        return x + (self.left.weight + self.right.weight)


class SumPolicy(Policy):
    def module_policy(self):
        return {"Net": [norm("norm")], "Sum": [replicate("left", "right")]}


def accumulated():
    torch.manual_seed(0)
    native = Net(WIDTH, [Sum()]).double()
    sharded = shardcore.shard(copy.deepcopy(native), policy=SumPolicy, tp=2)
    for _ in range(3):
        _compare(native, sharded, torch.randn(1, 7, WIDTH, dtype=torch.float64))


def test_tables_that_another_module_adds_accumulate_apart(pool):
    pool.run(accumulated, world=2)


def refused():
    _, sharded = _reader(vocab("table"))
    with pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor"):
        sharded(torch.arange(5))


def test_a_split_parameter_that_another_module_reads_is_an_error(pool):
    pool.run(refused, world=2)
