"""Captured hidden states of stacks whose tokens are split, one stack inside of another among them."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import randomize, shard
from torch import Tensor, nn

from shardcore.compile import compile_plan
from shardcore.config import ShardConfig
from shardcore.errors import PlanError
from shardcore.policy import ModulePolicy, Policy
from shardcore.styles import outputs, region, sequence
from shardcore_testing.parity import assert_close, assert_same_gradients

WIDTH, BATCH, TOKENS, PATCHES = 8, 2, 5, 7


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Out(dict[str, Any]):
    """What transformers calls a ModelOutput, in short."""


class Decoder(nn.Module):
    """Its own blocks read what a tower inside of it has made of patches, which are more than its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.layers = Tower(), nn.ModuleList(Block() for _ in range(2))
        self.config = SimpleNamespace(return_dict=True, output_hidden_states=False)

    def forward(self, x: Tensor, patches: Tensor) -> Out:
        x = x + self.tower(patches).mean(1, keepdim=True)
        states = [x]
        for layer in self.layers:
            x = layer(x)
            states.append(x)
        return Out(last=x, hidden_states=tuple(states))


class Pools(Tower):
    """The last state that it returns is half as long as the others: as long as the part of one of two ranks."""

    def forward(self, x: Tensor) -> Out:
        states = [x]
        for layer in self.layers:
            states.append(layer(states[-1]))
        states[-1] = states[-1].unflatten(1, (-1, 2)).mean(2)
        return Out(last_hidden_state=states[-1], hidden_states=tuple(states))


class Both(nn.Module):
    """Two stacks, side by side, of which it returns the states."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Tower(), Tower()

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + self.two(x)


class NetPolicy(Policy):
    def module_policy(self) -> ModulePolicy:
        split = sequence(scatter="layers[0]", gather="layers[-1]")
        gathered = outputs(hidden_states="sequence")
        rules = [gathered] if isinstance(self.model, Both) else [split, gathered]
        block = region(enter="up", col="up", row="down")
        towers = {} if isinstance(self.model, Tower) else {"Tower": [split]}
        return {type(self.model).__name__: rules, **towers, "Block": [block]}


def nested() -> None:
    generator = torch.Generator().manual_seed(0)
    _compare(Decoder(), *(torch.randn(BATCH, n, WIDTH, generator=generator).double() for n in (TOKENS, PATCHES)))


def pooled() -> None:
    _compare(Pools(), torch.randn(BATCH, 8, WIDTH, generator=torch.Generator().manual_seed(0)).double())


def _compare(native: nn.Module, *inputs: Tensor) -> None:
    randomize(native.double())
    model = shard(copy.deepcopy(native), NetPolicy, enable_sequence_parallelism=True)
    outs = [m(*inputs)["hidden_states"] for m in (native, model)]
    for wanted, got in zip(*outs, strict=True):
        assert_close(wanted, got, "a captured state")
    for states in outs:
        sum(state.square().sum() for state in states).backward()
    assert_same_gradients(native, model)


def test_those_of_a_stack_around_another_are_its_own(pool):
    pool.run(nested, world=2)


def test_the_last_of_a_stack_that_pools_is_whole(pool):
    pool.run(pooled, world=2)


def test_those_of_two_stacks_are_no_ones():
    config = ShardConfig.of(tp=2, enable_sequence_parallelism=True).resolve(2)
    with pytest.raises(
        PlanError, match=r"(?s)the tokens of one, two are split, each by itself.*under the class of each"
    ):
        compile_plan(NetPolicy, Both(), config, device_type="cpu")
