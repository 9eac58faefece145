"""Two words that are no part of the core: all that a word consists of is here."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardcore
from shardcore import Heads, Policy
from shardcore.comm.dtensor_params import read_local
from shardcore.nn import Layout, ParallelMixin, ShardedLayout
from shardcore.nn.costs import Collective, Site, forward
from shardcore.plan.steps.base import ApplyContext, Commit, Phase, Step
from shardcore.policy import Rule, Scope
from shardcore.styles import norm, region, replicate
from shardcore_testing.parity import assert_close, assert_same_gradients

HEADS, WIDTH = 4, 8


# The word `per_head`: a table of biases with a column for each head, of which a rank needs those of its heads.


class HeadTable(ParallelMixin, nn.Embedding):
    """An embedding whose columns are split: weight (N, heads/tp)."""

    native_classes: ClassVar[tuple[type[nn.Module], ...]] = (nn.Embedding,)

    @classmethod
    def layouts(cls, module: nn.Module, ranks: int, **options: Any) -> Mapping[str, Layout]:
        return {"weight": ShardedLayout(1)}

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # as in nn.Embedding
        (weight,) = read_local(self.weight)
        return F.embedding(input, weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class PerHeadRule(Rule):
    name: str

    def plan(self, scope: Scope) -> None:
        if scope.find(self.name) is not None:
            scope.swap(self.name, HeadTable)


def per_head(name: str) -> Rule:
    return PerHeadRule(text=f"per_head({name!r})", name=name)


# The word `capped`: what a module returns is cut off at a limit. It has a step of its own.


class Capped(ParallelMixin):
    keeps_name: ClassVar[bool] = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs).clamp(max=self.__dict__["_limit"])


@dataclass(frozen=True, slots=True, kw_only=True)
class CapOutput(Step):
    phase: ClassVar[Phase] = Phase.CHANGE
    mixin: ClassVar[type[ParallelMixin]] = Capped

    limit: float

    def describe(self) -> str:
        return f"capped at {self.limit}"

    def conflict(self, other: Step) -> str | None:
        return f"two limits for {self.path}" if isinstance(other, CapOutput) else None

    def collectives(self, site: Site) -> Iterator[Collective]:
        yield forward(self.path, "all_reduce", "nothing, but it is counted")

    def prepare(self, ctx: ApplyContext) -> Commit:
        module = ctx.model.get_submodule(self.path)

        def commit() -> None:
            Capped.swap_class(module, ctx.shared).__dict__["_limit"] = self.limit

        return commit


@dataclass(frozen=True, slots=True, kw_only=True)
class CappedRule(Rule):
    name: str
    limit: float

    def plan(self, scope: Scope) -> None:
        if scope.find(self.name) is not None:
            scope.add(CapOutput(path=scope.name(self.name), limit=self.limit))


def capped(name: str, limit: float) -> Rule:
    return CappedRule(text=f"capped({name!r}, {limit})", name=name, limit=limit)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.table = nn.Embedding(7, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (linear(x).view(b, s, -1, WIDTH // HEADS).transpose(1, 2) for linear in (self.q, self.k, self.v))
        places = torch.arange(s)
        bias = self.table((places[:, None] - places).abs()).permute(2, 0, 1)
        weights = (q @ k.transpose(-1, -2) + bias).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(b, s, -1))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = type("Config", (), {"heads": HEADS})()
        self.norm, self.attention, self.last = nn.LayerNorm(WIDTH), Attention(), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.attention(self.norm(x)))


class NetPolicy(Policy):
    checks = (Heads("heads"),)
    limits: ClassVar[tuple[float, ...]] = (0.3,)

    def module_policy(self) -> Any:
        columns = ("attention.q", "attention.k", "attention.v")
        return {
            "Net": [
                norm("norm"),
                region(enter="attention", col=columns, row="attention.out", unit="head"),
                per_head("attention.table"),
                replicate("last"),
                *(capped("norm", limit) for limit in self.limits),
            ]
        }


def trains() -> None:
    torch.manual_seed(0)
    reference = Net().double()
    model = copy.deepcopy(reference)
    Capped.swap_class(reference.norm, None).__dict__["_limit"] = 0.3  # type: ignore[arg-type]  # no rank is asked for
    shardcore.shard(model, policy=NetPolicy, tp=2)
    assert model.attention.table.weight.to_local().shape == (7, HEADS // 2)
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    out, wanted = model(x), reference(x)
    assert_close(out, wanted, "the output")
    for result in (out, wanted):
        result.square().sum().backward()
    assert_same_gradients(reference, model)
