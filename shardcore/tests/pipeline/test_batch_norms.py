"""Norms over the rows of a batch, of which a micro-batch has some (H49)."""

from __future__ import annotations

import copy
from pipes import close, pipeline, whole_step

import pytest
import torch
from needs import PIPELINES
from tiny import randomize
from torch import Tensor, nn

from shardcore.errors import NotSupportedError
from shardcore.policy import ModulePolicy, Policy, Stages
from shardcore.styles import region, replicate

pytestmark = PIPELINES

WIDTH = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class NetPolicy(Policy):
    stages = Stages(blocks="layers")

    def module_policy(self) -> ModulePolicy:
        return {"Block": [replicate("norm"), region(enter="up", col="up", row="down")]}


def _models() -> tuple[nn.Module, nn.Module, dict[str, Tensor]]:
    native = Net().double()
    randomize(native)
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0)).double()
    return native, copy.deepcopy(native), {"x": x}


def in_parts() -> None:
    native, model, call = _models()
    pipe = pipeline(model, NetPolicy, num_microbatches=2)
    with pytest.raises(NotSupportedError, match=r"2 norms of Net \(BatchNorm1d\).*num_microbatches=1"):
        pipe.train_step(call)
    for m in (native, pipe):
        for norm in (module for module in m.modules() if isinstance(module, nn.BatchNorm1d)):
            norm.eval()
    _same_step(native, pipe, call)


def as_one() -> None:
    native, model, call = _models()
    pipe = pipeline(model, NetPolicy, num_microbatches=1)
    for _ in range(2):
        _same_step(native, pipe, call)
    wanted = dict(native.named_buffers())
    for name, buffer in pipe.named_buffers():
        if not buffer.is_meta:
            close(wanted[name].double(), buffer.double(), name)


def _same_step(native: nn.Module, pipe: nn.Module, call: dict[str, Tensor]) -> None:
    native.zero_grad()
    pipe.zero_grad()
    assert abs(float(pipe.train_step(call)) - float(whole_step(native, call))) <= 1e-12
    wanted = dict(native.named_parameters())
    for name, parameter in pipe.named_parameters():
        close(wanted[name].grad, parameter.grad, name)


def test_micro_batches_have_no_statistics_of_their_own(pool):
    pool.run(in_parts, world=2)


def test_a_batch_that_is_run_as_one_has_them(pool):
    pool.run(as_one, world=2)
