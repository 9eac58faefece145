"""Drafts that go through the checks of the kit before they are written down."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from shardcore_scaffold import Example, proof, write_pack
from shardcore_scaffold.draft import Draft
from shardcore_scaffold.facts import Facts
from shardcore_testing.cases import Case

#: In `Drawing` all heads add one table, of which each rank would drop other entries.
MODELS = """
import torch
from torch import nn

class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 96), nn.Linear(8, 96), nn.Linear(96, 8)

    def forward(self, x):
        return self.down(torch.sigmoid(self.gate(x)) * self.up(x))

class Drawing(Mlp):
    def __init__(self, dropout):
        super().__init__()
        self.table, self.drop = nn.Parameter(torch.randn(24)), nn.Dropout(dropout)

    def forward(self, x):
        states = (torch.sigmoid(self.gate(x)) * self.up(x)).unflatten(-1, (-1, 24))
        return self.down((states + self.drop(self.table)).flatten(2))

class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.drawing, self.mlp = Drawing(dropout), Mlp()

    def forward(self, x):
        x = x + self.drawing(x)
        return x + self.mlp(x)

class Net(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.blocks = nn.ModuleList([Block(dropout), Block(dropout)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return {"loss": x.square().mean()}

def example(seed=0, dropout=0.0):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(seed)
    return Net(dropout).double(), {"x": torch.randn(3, 5, 8, generator=generator, dtype=torch.float64)}
"""


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Example:
    name = f"models_of_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODELS)
    monkeypatch.syspath_prepend(tmp_path)
    model, inputs = importlib.import_module(name).example()
    return Example(model.eval(), inputs, source=f"{name}:example")


class _Kit:
    """Stands for the checks: what draws fails where it is split, and so do pipelines that are claimed."""

    def __init__(self, *, always: bool = False) -> None:
        self.always, self.seen, self.error = always, list[Draft](), 0.0

    def failures(self, draft: Draft, only: Collection[str] = ()) -> dict[str, str]:
        self.seen.append(draft)
        found = {"dropout": "ranks draw apart"} if self.always or ("Block", "drawing.down") in draft.split else {}
        found |= {"schedules": "another loss"} if draft.stages else {}
        return {check: said for check, said in found.items() if not only or check in only}


def _settled(example: Example, monkeypatch: pytest.MonkeyPatch, kit: _Kit) -> proof.Settled:
    @contextlib.contextmanager
    def stand_in(made: object, only: object) -> Iterator[_Kit]:
        yield kit

    monkeypatch.setattr(proof, "_kit", stand_in)
    return proof.settled(
        Facts(example.model, lambda model: model(**example.inputs)), lambda folder, name, draft: (None, "")
    )


def test_what_fails_where_it_is_split_is_left_whole_and_nothing_else(example: Example, monkeypatch) -> None:
    kit = _Kit()
    settled = _settled(example, monkeypatch, kit)
    found = settled.draft
    assert {("Block", "drawing.down"), ("Block", "mlp.down")} <= kit.seen[0].split
    assert found.split == kit.seen[0].split - {("Block", "drawing.down")}
    assert found.closed == {"pipeline"}
    assert not found.stages
    assert any(
        "Block: what ends at drawing.down is left whole" in doubt and "dropout" in doubt for doubt in found.doubts
    )
    assert any("pipeline is not claimed: another loss" in doubt for doubt in found.doubts)
    assert not settled.failed


def test_what_fails_however_little_is_split_is_named_and_costs_nothing(example: Example, monkeypatch) -> None:
    kit = _Kit(always=True)
    settled = _settled(example, monkeypatch, kit)
    assert settled.draft.split == kit.seen[0].split
    assert settled.failed == {"dropout": "ranks draw apart"}


def test_no_two_drafts_of_a_process_have_one_name(monkeypatch) -> None:
    names: list[str] = []

    def made(folder: Path, name: str, draft: Draft) -> tuple[Case, str]:
        names.append(name)
        return Case(name="one", build=dict, inputs=dict), ""

    monkeypatch.setattr(proof, "examine", lambda *args, **options: [])
    for _ in range(2):
        with proof._kit(made, ("training",)) as kit:
            kit.failures(Draft())
            kit.failures(Draft())
    assert len(set(names)) == 4
    assert all(name.replace("-", "_").isidentifier() for name in names)


@pytest.mark.nightly
def test_the_kit_finds_out(example: Example, tmp_path: Path) -> None:
    _, found = write_pack("shard-drawing", example, tmp_path, checked=True)
    assert ("Block", "drawing.down") not in found.split
    assert ("Block", "mlp.down") in found.split
    assert not [doubt for doubt in found.doubts if doubt.startswith("the kit's")]
