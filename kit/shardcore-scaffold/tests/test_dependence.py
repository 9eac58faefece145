"""What depends on what in small modules, and the regions that follow."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardcore_scaffold.dependence import dependence_of
from shardcore_scaffold.facts import Facts
from shardcore_scaffold.reading import reading
from shardcore_scaffold.structure import Column, Split, regions_of

HEADS, SIZE, WIDTH = 4, 3, 12


class Attention(nn.Module):
    """Self-attention with everything that may lie between its linears."""

    def __init__(self, order: str, kv: int = HEADS, *, norm: str = "", table: bool = False, past: bool = False) -> None:
        super().__init__()
        self.order, self.kv, self.num_heads = order, kv, HEADS
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * kv) * SIZE)
        self.out = nn.Linear(HEADS * SIZE, WIDTH)
        self.norm = nn.RMSNorm({"heads": SIZE, "all": HEADS * SIZE}[norm]) if norm else None
        self.over_all = norm == "all"
        self.bias = nn.Parameter(torch.randn(5, HEADS)) if table else None
        self.past = nn.Linear(WIDTH, SIZE) if past else None

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        made, (rows, length, _) = self.qkv(states), states.shape
        if self.order == "projection":
            q, k, v = made.split([HEADS * SIZE, self.kv * SIZE, self.kv * SIZE], -1)
            q, k, v = (x.view(rows, length, -1, SIZE) for x in (q, k, v))
        elif self.order == "head":
            q, k, v = made.view(rows, length, self.num_heads, 3 * SIZE).chunk(3, -1)
        else:
            grouped = made.view(rows, length, self.kv, HEADS // self.kv + 2, SIZE)
            q, k, v = grouped[..., :-2, :].flatten(2, 3), grouped[..., -2, :], grouped[..., -1, :]
        k, v = (x.repeat_interleave(HEADS // self.kv, 2) for x in (k, v))
        if self.norm is not None:
            q = self.norm(q.flatten(2)).view_as(q) if self.over_all else self.norm(q)
        if self.past is not None:
            q = q * self.past(states)[:, :, None]
        mask = 0.0 if self.bias is None else self.bias.T[:, None, :length]
        out = functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), scale=1.0)
        out = out + (mask @ v.transpose(1, 2) if self.bias is not None else 0.0)
        return self.out(out.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    def __init__(self, activation: str = "silu") -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(WIDTH, 14), nn.Linear(7, WIDTH)
        self.activation = getattr(functional, activation)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(states).chunk(2, -1)
        return self.down(self.activation(gate) * up)


def found(module: nn.Module):
    torch.manual_seed(0)
    module = module.double()
    states = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    dependence = dependence_of(module, lambda module: module(states))
    return dependence, *regions_of(dependence, list(dependence.linears))


@pytest.mark.parametrize(
    ("order", "kv", "column"),
    [
        ("projection", HEADS, Column("qkv", 9, 3, (3, 3, 3))),
        ("head", HEADS, Column("qkv", 9, 1, (9,))),
        ("projection", 2, Column("qkv", 12, 3, (6, 3, 3))),
        ("group", 2, Column("qkv", 12, 1, (12,))),
    ],
)
def test_heads_and_the_order_of_their_features(order, kv, column):
    _, regions, _ = found(Attention(order, kv))
    (region,) = regions
    assert (region.row, region.units, region.width) == ("out", kv, HEADS // kv * SIZE)
    assert region.columns == [column]
    assert (region.partial, region.split, region.past) == ([], [], [])


def test_what_heads_share_and_what_is_theirs():
    _, (region,), _ = found(Attention("head", norm="heads", table=True))
    assert region.partial == ["norm.weight"]
    assert region.split == [Split("bias", 1)]


def test_what_goes_past_the_columns():
    _, (region,), _ = found(Attention("head", past=True))
    assert [column.name for column in region.columns] == ["qkv"]
    assert region.past == ["past"]


def test_a_norm_over_all_heads_leaves_nothing_to_split():
    _, regions, reasons = found(Attention("projection", norm="all"))
    assert regions == []
    assert "depend on each other" in reasons["out"]


class Stack(nn.Module):
    """Two blocks with a linear each for queries, keys and values, and norms over all heads."""

    class Block(nn.Module):
        def __init__(self, norm: type[nn.Module]) -> None:
            super().__init__()
            self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
            self.q_norm, self.k_norm, self.num_heads = norm(WIDTH), norm(WIDTH), HEADS

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            made = (self.q_norm(self.q(states)), self.k_norm(self.k(states)), self.v(states))
            q, k, v = (x.unflatten(-1, (-1, SIZE)).transpose(1, 2) for x in made)
            return states + self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Stack.Block(norm) for _ in range(2)])

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            states = block(states)
        return states


def facts_of(norm: type[nn.Module]) -> Facts:
    torch.manual_seed(0)
    model = Stack(norm).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return Facts(model, lambda model: model(torch.ones(2, 5, WIDTH).cumsum(1).double()))


class RMS(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), 1e-5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


def test_norms_over_all_heads_that_can_be_split():
    facts = facts_of(RMS)
    assert facts.norms == {f"blocks.{i}.{x}_norm": f"blocks.{i}.{x}" for i in range(2) for x in "qk"}
    assert [(region.row, region.units) for region in facts.regions] == [(f"blocks.{i}.out", HEADS) for i in range(2)]


def test_norms_over_all_heads_of_another_kind_are_none():
    facts = facts_of(nn.LayerNorm)  # has a mean too
    assert facts.norms == {}
    assert facts.regions == []


@pytest.mark.parametrize("activation", ["silu", "relu", "gelu", "sigmoid", "tanh"])
def test_a_fused_gate(activation):
    module = Gated(activation)
    with torch.no_grad():
        module.gate_up.bias[2] = -100.0  # never lets anything pass, or is rounded so
    _, (region,), _ = found(module)
    assert (region.row, region.units, region.width) == ("down", 7, 1)
    assert region.columns == [Column("gate_up", 2, 2, (1, 1))]


def test_scores_of_which_one_is_all():
    class Scored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.keys, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            heads = 1e6 * self.keys(states).unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
            return self.out((functional.softmax(heads @ heads.mT, -1) @ heads).transpose(1, 2).flatten(2))

    _, (region,), _ = found(Scored())
    assert (region.row, region.units, region.width) == ("out", HEADS, SIZE)


def test_interleaved_gates_are_one_run_for_each_unit():
    class Interleaved(Gated):
        def forward(self, states: torch.Tensor) -> torch.Tensor:
            made = self.gate_up(states)
            return self.down(functional.silu(made[..., ::2]) * made[..., 1::2])

    _, (region,), _ = found(Interleaved())
    assert region.columns == [Column("gate_up", 2, 1, (2,))]


def test_features_in_no_order_are_told():
    class Shuffled(Gated):
        def forward(self, states: torch.Tensor) -> torch.Tensor:
            gate, up = self.gate_up(states)[..., [3, 0, 6, 1, 5, 2, 4, *range(7, 14)]].chunk(2, -1)
            return self.down(functional.silu(gate) * up)

    _, (region,), _ = found(Shuffled())
    assert region.columns[0].runs == 0


def test_a_parameter_that_is_read_outside_too_spoils_its_region():
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.head = Attention("head", norm="heads"), nn.Linear(WIDTH, 2)

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return self.head(self.attention(states) * self.attention.norm.weight.sum())

    _, regions, reasons = found(Reader())
    assert regions == []
    assert reasons["attention.out"] == "attention.norm.weight is read inside and outside"


def test_a_residual_is_seen():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Gated()

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return states + self.inner(hidden := states * 1.0) + 0 * hidden

    dependence, _, _ = found(Block())
    assert "" in dependence.residual
    assert "inner" not in dependence.residual


class Repeated(nn.Module):
    """Repeats each token as many times as the exponential of what a linear says of it."""

    def __init__(self) -> None:
        super().__init__()
        self.durations, self.out = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.out(states.repeat_interleave(self.durations(states).exp().long().flatten(), 0))


def test_lengths_that_grow_exponentially_stay_short():
    model = Repeated()
    nn.init.constant_(model.durations.weight, 0.0)
    nn.init.constant_(model.durations.bias, 9.0)
    states = torch.randn(2, WIDTH)
    assert len(model(states)) == 2 * 8103
    (given,) = dependence_of(model, lambda m: m(states)).linears["out"].inputs
    assert 2 < len(given) < 50


def test_numbers_that_a_forward_reads():
    class Settings:
        def __init__(self) -> None:
            self.heads, self.unused = HEADS, 3

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.config, self.other = Attention("head"), Settings(), 5

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return self.attention(states) * self.config.heads

    model = Model()
    classes = [type(module) for module in model.modules()]
    with reading(model) as numbers:
        model(torch.randn(2, 5, WIDTH))
    assert numbers["attention"]["num_heads"] == HEADS
    assert numbers[""] == {"config.heads": HEADS}
    assert [type(module) for module in model.modules()] == classes
