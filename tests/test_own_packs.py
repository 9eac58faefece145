"""Packs for modules of one's own, which no distribution brings: they install, and their tests pass as written."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib

import pytest
import torch
from click.testing import CliRunner

from shardcore_cli import main

pytest.importorskip("transformers")  # which the command needs

MODULE = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.drop(self.down(self.up(self.norm(x)).relu()))

class Net(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.blocks = nn.ModuleList([Block(dropout), Block(dropout)])
        self.head = nn.Linear(8, 40)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        scores = self.head(x)
        loss = scores.square().mean()
        return RETURNED

def example(seed=0, DROPOUT):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(seed)
    return Net(dropout), {"x": torch.randn(3, 7, 8, generator=generator, dtype=torch.float64)}
"""
DROPOUT = "dropout=0.0"


@pytest.fixture
def pack(tmp_path, monkeypatch):
    """Write a pack for a model that returns something; return its folder, its case and its dependencies."""

    def written(name, returned, dropout=DROPOUT):
        text = MODULE.replace("RETURNED", returned).replace("DROPOUT", dropout)
        (tmp_path / f"own_{name}.py").write_text(
            text if dropout == DROPOUT else text.replace("Net(dropout)", "Net(0.0)")
        )
        monkeypatch.syspath_prepend(tmp_path)
        arguments = ["new-pack", f"shard-{name}", "--example", f"own_{name}:example", "--into", str(tmp_path)]
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 0, result.output
        monkeypatch.syspath_prepend(tmp_path / f"shard-{name}" / "src")
        (case,) = importlib.import_module(f"shard_{name}.cases").cases()
        return tmp_path / f"shard-{name}", case

    return written


@pytest.mark.parametrize(
    ("name", "returned", "loss"),
    [
        ("first", "loss, scores", lambda out: out[0]),
        ("tensor", "scores", None),
        ("second", "scores, x.argmax(), x", None),
        ("named", "{'scores': scores}", None),
        ("losses", "{'loss': loss, 'logits': scores}", "loss"),
    ],
)
def test_its_case_has_a_loss_of_what_the_model_returns(pack, name, returned, loss):
    _, case = pack(name, returned)
    model = case.build(dropout=0.0)
    assert all(parameter.unique().numel() > 1 for parameter in model.parameters())
    out = model(**case.inputs(model, 1))
    found = out[case.loss] if isinstance(case.loss, str) else case.loss(out)
    assert found.ndim == 0
    assert found.requires_grad
    if callable(loss):
        assert torch.equal(found, loss(out))
    assert case.loss == loss or loss != "loss"
    assert case.supports.dropout
    assert not case.supports.checkpointing


def test_it_depends_on_nothing_that_no_index_has(pack):
    folder, case = pack("alone", "scores", dropout="**options")
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    assert [need.partition(">")[0] for need in project["project"]["dependencies"]] == ["shardcore", "torch"]
    (release,) = project["tool"]["shardcore"]["matrix"]["torch"]
    assert project["project"]["optional-dependencies"]["tested"] == [f"torch=={release}"]
    assert torch.__version__.startswith(release)
    assert not case.supports.dropout  # the example builds none


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "returned"), [("paired", "loss, scores"), ("single", "scores")])
def test_its_tests_pass_as_it_is_written(pack, tmp_path, name, returned):
    folder, _ = pack(name, returned)
    command = [sys.executable, "-m", "pytest", "-q", "--quick", "-p", "no:cacheprovider", folder.name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
