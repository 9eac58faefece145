"""Outputs that a model captures: whole, differentiable, and in the places of the native tuple."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny import randomize, shard
from torch import Tensor, nn

import shardcore
from shardcore.compile import compile_plan
from shardcore.config import ShardConfig
from shardcore.errors import NotSupportedError
from shardcore.plan.steps.outputs import RefuseCaptured
from shardcore.policy import Policy, Stages
from shardcore.styles import attribute, outputs, per_rank, region
from shardcore_testing.parity import assert_close, assert_same_gradients

WIDTH, HEADS = 16, 4


@dataclass
class Out:
    """What transformers calls a ModelOutput, in short."""

    states: Tensor
    pooled: Tensor | None = None
    attentions: tuple[Tensor, ...] | None = None
    cross_attentions: tuple[Tensor, ...] | None = None

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self, name, value)

    def to_tuple(self) -> tuple[Any, ...]:
        return tuple(v for v in (getattr(self, f.name) for f in fields(self)) if v is not None)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (p(x).view(*x.shape[:-1], self.heads, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
        weights = (q @ k.transpose(-1, -2)).softmax(-1)  # (B, heads, S, S)
        return self.out((weights @ v).transpose(1, 2).flatten(2)), weights


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out, weights = self.attention(x)
        return x + out, weights


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        x, captured = self.drop(x), []
        for layer in self.layers:
            x, weights = layer(x)
            captured.append(weights)
        return x, tuple(captured)


class Body(nn.Module):
    """Its tuple has a place for what is pooled, whether something is or not."""

    def __init__(self, *, pools: bool) -> None:
        super().__init__()
        self.stack, self.pools = Stack(), pools
        self.config = SimpleNamespace(return_dict=True, output_attentions=False)

    def forward(
        self, x: Tensor, output_attentions: bool | None = None, return_dict: bool | None = None
    ) -> Out | tuple[Any, ...]:
        capture = self.config.output_attentions if output_attentions is None else output_attentions
        states, weights = self.stack(x)
        pooled = states[:, 0].tanh() if self.pools else None
        if not (self.config.return_dict if return_dict is None else return_dict):
            return (states, pooled, *([weights] if capture else []))
        return Out(states, pooled, weights if capture else None)


class Net(nn.Module):
    def __init__(self, *, pools: bool = True) -> None:
        super().__init__()
        self.body = Body(pools=pools)

    def forward(self, x: Tensor, **options: Any) -> Any:
        return self.body(x, **options)


class NetPolicy(Policy):
    stages = Stages(first="drop", blocks="layers").under("stack").under("body")
    places: str | tuple[str, ...] = "pooled"

    def module_policy(self) -> Any:
        projections = ("attention.q", "attention.k", "attention.v")
        return {
            "Body": [outputs(attentions="heads", heads="stack.layers.0.attention.heads", places=self.places)],
            "Layer": [
                region(enter="attention", col=projections, row="attention.out", heads="attention.heads"),
                attribute("attention.heads", per_rank),
            ],
        }


class CrossBody(Body):
    """Returns weights of a second kind, of as many heads."""

    def forward(self, x: Tensor, **options: Any) -> Any:
        out = super().forward(x, **options)
        out.cross_attentions = out.attentions
        return out


class ForgetsSecond(NetPolicy):
    second: Any = None

    def module_policy(self) -> Any:
        rule = outputs(attentions="heads", cross_attentions=self.second, heads="stack.layers.0.attention.heads")
        return {**super().module_policy(), "CrossBody": [rule]}


class GathersBoth(ForgetsSecond):
    second = "heads"


class WithoutPlaces(NetPolicy):
    places = ()


class GathersNothing(NetPolicy):
    def module_policy(self) -> Any:
        return {name: rules for name, rules in super().module_policy().items() if name != "Body"}


def _pair(policy: type[Policy] = NetPolicy, *, pools: bool = True) -> tuple[Any, Any]:
    reference = Net(pools=pools).to(torch.float64)
    randomize(reference)
    return reference, shard(copy.deepcopy(reference), policy)


def _input(seed: int = 0) -> Tensor:
    return torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _same(wanted: Any, got: Any, what: str) -> None:
    assert type(wanted) is type(got), what
    if isinstance(wanted, Tensor):
        assert_close(wanted, got, what)
    elif isinstance(wanted, tuple):
        assert len(wanted) == len(got), what
        for index, (mine, theirs) in enumerate(zip(wanted, got, strict=True)):
            _same(mine, theirs, f"{what}[{index}]")
    elif isinstance(wanted, Out):
        for field in fields(wanted):
            _same(getattr(wanted, field.name), getattr(got, field.name), field.name)


def captured() -> None:
    reference, model = _pair()
    for seed in (0, 1):
        outs = [m(_input(seed), output_attentions=True) for m in (reference, model)]
        _same(*outs, "output")
        assert outs[1].attentions[0].shape[1] == HEADS
        for out in outs:
            sum(w.square().sum() for w in out.attentions).backward()
    assert_same_gradients(reference, model)
    assert model(_input()).attentions is None


def tuples() -> None:
    x = _input()
    for pools in (True, False):
        reference, model = _pair(pools=pools)
        # What the caller says counts; None, and nothing, leave it to the configuration.
        for by_default in (True, False):
            for m in (reference, model):
                m.body.config.return_dict = by_default
            for capture in (False, True):
                for switch in ({}, {"return_dict": None}, {"return_dict": True}, {"return_dict": False}):
                    wanted, got = (m(x, output_attentions=capture, **switch) for m in (reference, model))
                    as_tuple = not by_default if switch.get("return_dict") is None else not switch["return_dict"]
                    assert isinstance(got, tuple) == as_tuple
                    _same(wanted, got, f"{pools=} {by_default=} {capture=} {switch}")
                for switch in (None, True, False):  # by position
                    wanted, got = (m.body(x, capture, switch) for m in (reference, model))
                    _same(wanted, got, f"{pools=} {by_default=} {capture=} {switch=} by position")


def without_places() -> None:
    _, model = _pair(WithoutPlaces, pools=False)
    assert [type(part) for part in model(_input(), output_attentions=True, return_dict=False)] == [Tensor, tuple]


def refused() -> None:
    reference, model = _pair(GathersNothing)
    message = r"this Body would return attentions that are not whole: .*layers\.0\.attention\.out.*outputs\(attentions="
    for switch in ({}, {"return_dict": False}):
        with pytest.raises(NotSupportedError, match=message):
            model(_input(), output_attentions=True, **switch)
        _same(reference(_input(), **switch), model(_input(), **switch), "what was not asked for")
        model.body.config.output_attentions = True  # a configuration asks too
        with pytest.raises(NotSupportedError, match=message):
            model(_input(), **switch)
        _same(
            reference(_input(), output_attentions=False, **switch),
            model(_input(), output_attentions=False, **switch),
            "not asked for",
        )
        model.body.config.output_attentions = False


def forgotten() -> None:
    reference = Net()
    reference.body = CrossBody(pools=False)
    randomize(reference.double())
    forgets, gathers = (shard(copy.deepcopy(reference), policy) for policy in (ForgetsSecond, GathersBoth))
    _same(reference(_input(), output_attentions=True), gathers(_input(), output_attentions=True), "both")
    with pytest.raises(
        NotSupportedError,
        match=r"this CrossBody would return cross_attentions of 2 heads.*to 4 heads.*cross_attentions=",
    ):
        forgets(_input(), output_attentions=True)
    _same(reference(_input()), forgets(_input()), "what was not asked for")


def guards() -> None:
    model = _pair()[1].train()
    model.body.stack.drop.p = 0.5
    torch.manual_seed(dist.get_rank())  # H40
    stack = model.body.stack
    calls = {"model": lambda x: model(x).states, "body": lambda x: model.body(x).states, "stack": lambda x: stack(x)[0]}
    for follows, (name, call) in itertools.product((True, False), calls.items()):
        if not follows:
            shardcore.manual_seed(model, 3)
        users = torch.get_rng_state()
        first, second = call(_input()), call(_input())
        everybody = [torch.empty_like(first) for _ in range(dist.get_world_size())]
        dist.all_gather(everybody, first.detach().contiguous())
        assert all(torch.equal(everybody[0], other) for other in everybody), f"{name} called by itself"
        assert not torch.equal(first, second), name
        moved = not torch.equal(users, torch.get_rng_state())
        assert moved == follows, f"{name} draws from the user's own stream"


@pytest.mark.parametrize("world", [2, 4])
def test_captured_outputs_are_whole_and_differentiable(pool, world):
    pool.run(captured, world=world)


def test_what_no_rule_gathers_is_refused(pool):
    pool.run(refused, world=2)


def test_what_a_rule_forgets_is_refused(pool):
    pool.run(forgotten, world=2)


def test_plans_say_what_is_refused():
    def refusals(policy: type[Policy], ranks: int = 2) -> list[RefuseCaptured]:
        config = ShardConfig.of(tp=ranks).resolve(ranks)
        plan = compile_plan(policy, Net(), config, device_type="cpu")
        return [step for step in plan.steps if isinstance(step, RefuseCaptured)]

    (refusal,) = refusals(GathersNothing)
    assert refusal.path == "body"  # its configuration can ask for them
    assert refusal.describe() == "refuses to return captured attentions, which no rule gathers"
    assert not refusals(NetPolicy)
    assert not refusals(GathersNothing, ranks=1)


def test_tuples_have_the_places_of_the_native_ones(pool):
    pool.run(tuples, world=2)


def test_without_places_a_tuple_holds_what_is_there(pool):
    pool.run(without_places, world=2)


def test_every_module_around_the_blocks_is_guarded(pool):
    pool.run(guards, world=2)
