"""Policies whose loss is exact and whose gradients are wrong are refused in the first call, on all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from blocks import Mlp
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardcore
from shardcore import Policy
from shardcore.comm.dtensor_params import read_partial
from shardcore.comm.gradients import GradPlacement
from shardcore.errors import PlanError
from shardcore.nn import Layout, ParallelMixin, ShardedLayout, root
from shardcore.nn.region.flow import Graph
from shardcore.nn.region.gradients import Wrong
from shardcore.policy import Rule, Scope
from shardcore.styles import col, enter_arg, norm, partial, region, replicate, row
from shardcore_testing.observing import Collectives
from shardcore_testing.parity import assert_close, assert_same_gradients

WIDTH, INNER, HEADS = 8, 16, 4


class Residual(nn.Module):
    """As the attention of BERT: the residual connection and its norm are inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = Mlp(WIDTH, INNER), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.inner(x))


class Latent(nn.Module):
    """As latent attention: one linear makes what enters, and what all heads read as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(WIDTH, WIDTH + 1), nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        latent, shared = self.a(x).split([WIDTH, 1], -1)
        return x + self.out(torch.tanh(self.b(latent)) * shared)


class Normed(nn.Module):
    """As queries with a norm of each head."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, INNER), nn.LayerNorm(INNER // HEADS), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.norm(self.up(x).unflatten(-1, (-1, INNER // HEADS)))
        return x + self.down(heads.flatten(-2))


class Plain(nn.Module):
    """No region at all."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.mlp = nn.Linear(WIDTH, WIDTH), Mlp(WIDTH, INNER)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.one(x))


class Net(nn.Module):
    """A linear, two blocks, and a loss if there are labels."""

    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList([kind(), kind()])
        self.double()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return {"x": x} if labels is None else {"loss": (x - labels).square().mean(), "x": x}


MLP = ("inner.up", "inner.down")


def policy_of(*rules: Any) -> Policy:
    class Own(Policy):
        def module_policy(self) -> Any:
            return {type(self.model.blocks[0]).__name__: list(rules), "Net": [replicate("first")]}

    return Own()


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, labels = (torch.randn(2, 5, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, labels


#: For each: the blocks, what the policy says of them, and what the error says.
WRONG: dict[str, tuple[type[nn.Module], tuple[Any, ...], str, str]] = {
    "a residual inside of what enters": (
        Residual,
        (region(enter="", col=MLP[0], row=MLP[1]), partial("norm")),
        (
            r"blocks\.1\.inner: what enters the region of blocks\.1\.inner\.up goes past it too, to blocks\.1\.norm: "
            r"a whole gradient and one rank's summand of another are added, and the gradient of first\.weight and of "
        ),
        "name in enter= a smaller module",
    ),
    "a shared key": (
        Latent,
        (col("b"), row("out"), replicate("a")),
        (
            r"blocks\.1\.a: what blocks\.1\.a makes is read by this rank's heads \(next to blocks\.1\.out\) without "
            r"entering, and by what all ranks compute alike \(next to blocks\.1\.b\)"
        ),
        "let it enter for all that reads it",
    ),
    "a norm of local heads": (
        Normed,
        (col("up"), norm("norm"), row("down")),
        r"blocks\.0\.norm: every rank holds blocks\.0\.norm\.weight whole, but what it makes is used by this rank's",
        r"say partial\('norm'\)",
    ),
    "a norm of whole tensors": (
        Residual,
        (region(enter="inner", col=MLP[0], row=MLP[1]), partial("norm")),
        (
            r"blocks\.0\.norm: its gradient is whole on every rank already, and is summed over them .* the gradient of "
            r"blocks\.0\.norm\.weight would be wrong, counted once for each rank"
        ),
        "leave out partial",
    ),
    "an entry into nothing": (
        Plain,
        (replicate("one", "mlp.up", "mlp.down"), enter_arg("", "x")),
        r"its gradient is whole on every rank already, and is summed over them .* the gradient of first\.weight",
        "leave out .* enter_arg",
    ),
}


class SummedTable(ParallelMixin, nn.Embedding):
    """A word of somebody else's: a table with a column for each head, whose gradient is summed all the same."""

    native_classes: ClassVar[tuple[type[nn.Module], ...]] = (nn.Embedding,)

    @classmethod
    def layouts(cls, module: nn.Module, ranks: int, **options: Any) -> Mapping[str, Layout]:
        return {"weight": ShardedLayout(1)}

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # as in nn.Embedding
        return F.embedding(input, read_partial(self._shard_context.channel, self.weight)[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class SummedRule(Rule):
    name: str

    def plan(self, scope: Scope) -> None:
        scope.swap(self.name, SummedTable)


class Biased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.table = Mlp(WIDTH, INNER, bias=False), nn.Embedding(5, INNER)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner.down(self.inner.up(x) + self.table(torch.arange(5)))


WRONG["a part that is summed"] = (
    Biased,
    (col(MLP[0]), row(MLP[1]), SummedRule(text="summed('table')", name="table")),
    r"blocks\.0\.table: blocks\.0\.table\.weight lies split over the ranks, and gets the gradient of a tensor that all",
    "or replicate the module",
)

#: The residual is inside of what enters, and the norm is said to follow the row linear, as it does.
UNMARKED = (region(enter="", col=MLP[0], row=MLP[1], after="norm"), norm("norm"))

RIGHT = {
    "a residual inside of what enters": (
        Residual,
        (region(enter="inner", col=MLP[0], row=MLP[1]), norm("norm")),
    ),
    "a shared key": (Latent, (region(enter="a", col="b", row="out"), replicate("a"))),
    "a norm of local heads": (Normed, (col("up"), partial("norm"), row("down"))),
}


def twins(kind: type[nn.Module], rules: Any, **fields: Any) -> tuple[Any, Any]:
    native = Net(kind)
    return native, shardcore.shard(copy.deepcopy(native), policy=policy_of(*rules), tp=dist.get_world_size(), **fields)


def refused(case: str) -> None:
    kind, rules, what, todo = WRONG[case]
    native, sharded = twins(kind, rules)
    x, labels = inputs()
    for _ in range(2):  # whoever catches the error is told again
        with pytest.raises(PlanError, match=what) as caught:
            sharded(x, labels=labels)
        assert caught.match(todo)
    with torch.no_grad():
        assert_close(native(x, labels=labels)["loss"], sharded(x, labels=labels)["loss"], "without a backward")


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_refused(pool: Any, case: str) -> None:
    pool.run(refused, case, world=2)


def accepted(case: str) -> None:
    kind, rules = RIGHT[case]
    for fields in ({}, {"partial_gradients": "deferred"}):
        native, sharded = twins(kind, rules, **fields)
        x, labels = inputs()
        for model in (native, sharded):
            model(x, labels=labels)["loss"].backward()
            model(x)["x"].square().sum().backward()
        if fields:
            shardcore.reduce_partial_gradients(sharded)
        assert_same_gradients(native, sharded)


@pytest.mark.parametrize("case", RIGHT)
def test_what_is_right_is_not(pool: Any, case: str) -> None:
    pool.run(accepted, case, world=2)


def frozen() -> None:
    """What is wrong for nobody is no mistake: before the first trained layer, a mixed gradient goes nowhere."""
    native, sharded = twins(Residual, UNMARKED)
    x, labels = inputs()
    for model in (native, sharded):
        model.requires_grad_(False)
        model.blocks[1].requires_grad_(True)
        model(x, labels=labels)["loss"].backward()
    assert_same_gradients(native, sharded)
    sharded.requires_grad_(True)
    with pytest.raises(PlanError):
        sharded(x, labels=labels)


def test_frozen_parameters(pool: Any) -> None:
    pool.run(frozen, world=2)


def input_is_learned() -> None:
    _, sharded = twins(Residual, UNMARKED)
    sharded.requires_grad_(False)
    sharded.blocks.requires_grad_(True)
    x, labels = inputs()
    with pytest.raises(PlanError, match=r"the gradient of \S+ and of"):
        sharded(x, labels=labels)
    sharded.blocks.requires_grad_(False)
    with pytest.raises(PlanError, match="the gradient of the argument at position 0 would be wrong"):
        sharded(x.requires_grad_(), labels=labels)


def test_arguments(pool: Any) -> None:
    pool.run(input_is_learned, world=2)


def once() -> None:
    _, sharded = twins(*RIGHT["a residual inside of what enters"])
    x, labels = inputs()
    seen: list[int] = []
    graph = root.Graph
    root.Graph = lambda outputs, *inputs: seen.append(len(outputs)) or graph(outputs, *inputs)  # type: ignore[assignment,misc]
    try:
        with Collectives() as sent:
            sharded(x, labels=labels)
            first = sent.take()
            sharded(x, labels=labels)
            assert sent.take() == first
        assert seen == [1]
        sharded(x)
        sharded(x)
        assert seen == [1, 1]
        sharded.eval()(x)
        assert seen == [1, 1, 1]
        with torch.no_grad():
            sharded(x.clone(), None)
        copy.deepcopy(sharded)(x)
        checkpoint(sharded, x, use_reentrant=False)["x"].sum().backward()
        assert seen == [1, 1, 1]
        sharded(x.requires_grad_())
        assert seen == [1, 1, 1, 1]
    finally:
        root.Graph = graph  # type: ignore[misc]


def test_each_way_of_calling_is_looked_at_once(pool: Any) -> None:
    pool.run(once, world=2)


def one_rank() -> None:
    """What one rank finds, it raises by itself: nobody waits, and the next step is right."""
    native, sharded = twins(*RIGHT["a residual inside of what enters"])
    x, labels = inputs()
    if dist.get_rank() == 0:
        root.wrong_gradients, kept = _everything, root.wrong_gradients
        with pytest.raises(PlanError, match="would be wrong"):
            sharded(x, labels=labels)
        root.wrong_gradients = kept
    else:
        sharded(x, labels=labels)
    for model in (native, sharded):
        model(x, labels=labels)["loss"].backward()
    assert_same_gradients(native, sharded)


def _everything(graph: Graph, own: Any) -> list[Any]:
    return [Wrong(leaf, got, GradPlacement.VARYING) for leaf, got in graph.leaves]


def test_what_one_rank_finds_keeps_no_other_waiting(pool: Any) -> None:
    pool.run(one_rank, world=2, timeout=20)


def another_kind() -> None:
    """A way of calling that changes nothing, on one rank at one step, and that the other has not seen."""
    native, sharded = twins(*RIGHT["a residual inside of what enters"])
    x, labels = inputs()
    for step in range(15):  # inputs are compared in the first steps
        args, kwargs = ((x, labels), {}) if dist.get_rank() == 0 and step == 12 else ((x,), {"labels": labels})
        for model in (native, sharded):
            model(*args, **kwargs)["loss"].backward()
    assert_same_gradients(native, sharded)


def test_ways_of_calling_may_differ_where_nothing_else_does(pool: Any) -> None:
    pool.run(another_kind, world=2, timeout=20)
