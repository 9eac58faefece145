"""A model around a fused column linear, sharded and trained next to its unsharded twin."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardcore.fsdp.phase import apply_data_parallel
from shardcore.mesh.axes import Sizes, build_mesh
from shardcore.mesh.context import ShardContext, set_context
from shardcore.nn import ColumnLinear, FusedColumnLinear, Replicated, RowLinear
from shardcore.nn.randomness import DropoutSites
from shardcore.nn.region.region import Region

IN, BATCH = 8, 4
STEP_NAMES = ("exp_avg", "exp_avg_sq")


class Inside(nn.Module):
    """Every segment meets the others elementwise, as query, key and value do: rows of a wrong segment show."""

    def __init__(self, segments, size, bias):
        super().__init__()
        self.segments = segments
        self.qkv = nn.Linear(IN, segments * size, bias=bias)
        self.gate = nn.Linear(IN, size, bias=bias)

    def forward(self, hidden):
        first, *others = self.qkv(hidden).chunk(self.segments, -1)
        return functools.reduce(lambda a, b: a.tanh() * b.exp() + b, others, first) * self.gate(hidden)


class Net(nn.Module):
    def __init__(self, segments, size=12, bias=True):
        super().__init__()
        self.before = nn.Linear(IN, IN)
        self.inside = Inside(segments, size, bias)
        self.out = nn.Linear(size, IN, bias=bias)

    @property
    def qkv(self):
        return self.inside.qkv

    def forward(self, x):
        return self.out(self.inside(self.before(x)))


def make_net(segments, size=12, bias=True, seed=0):
    torch.manual_seed(seed)
    return Net(segments, size, bias).double()


def make_context(shape, **options):
    replicas, shards, tp = (1, 1, *shape)[-3:]
    return ShardContext.of(build_mesh(Sizes(dp_replicate=replicas, dp_shard=shards, tp=tp)), **options)


def shard_net(net, context, region=False):
    inside = net.inside
    Replicated.from_native_module(net.before, context)
    FusedColumnLinear.from_native_module(inside.qkv, context, segments=inside.segments, enters=not region)
    ColumnLinear.from_native_module(inside.gate, context, enters=not region)
    RowLinear.from_native_module(net.out, context)
    if region:
        net.out.region = Region(context, ("hidden", 0), [inside.qkv, inside.gate], DropoutSites())
        inside.register_forward_pre_hook(net.out.region, with_kwargs=True)
    set_context(net, context)
    return net


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_equal(ours, reference, what):
    torch.testing.assert_close(
        whole(ours.detach()), reference.detach(), rtol=1e-11, atol=1e-12, msg=lambda m: f"{what}: {m}"
    )


def batch(step):
    return torch.randn(BATCH, IN, generator=torch.Generator().manual_seed(100 + step), dtype=torch.double)


def train(net, optimizer, steps, *, part=0, parts=1):
    """Yield nothing, return the total norms; each data-parallel rank sees its part of the batch."""
    norms = []
    for step in steps:
        loss = net(batch(step).chunk(parts)[part]).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        norms.append(whole(nn.utils.clip_grad_norm_(net.parameters(), 0.05)).detach())
        optimizer.step()
    return norms


def assert_same_state(net, optimizer, reference, reference_optimizer):
    ours = dict(net.named_parameters())
    for name, expected in reference.named_parameters():
        assert_equal(ours[name], expected, name)
        for key in STEP_NAMES:
            state = reference_optimizer.state[expected]
            assert_equal(optimizer.state[ours[name]][key], state[key], f"{key} of {name}")


def adamw(net, **options):
    return torch.optim.AdamW(net.parameters(), lr=1e-2, **options)


def trained(segments, steps=2, **options):
    net = make_net(segments)
    optimizer = adamw(net, **options)
    return net, optimizer, train(net, optimizer, range(steps))


def make_sharded(segments, shape, seed=0, **options):
    """Return a model on (dp_replicate, dp_shard, tp) ranks, its optimizer and which part of a batch it sees."""
    net = make_net(segments, seed=seed)
    if shape is None:
        return net, adamw(net, **options), {}
    context = make_context(shape)
    shard_net(net, context)
    apply_data_parallel(net, context, None)
    mesh = context.mesh["dp_replicate", "dp_shard"]
    return net, adamw(net, **options), {"part": context.replica, "parts": mesh.size()}


def ranks(shape):
    return 1 if shape is None else torch.Size(shape).numel()
