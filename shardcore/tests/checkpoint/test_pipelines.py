"""A training of a pipeline goes on on any other mesh, and one of any other mesh as a pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from needs import PIPELINES
from tiny import TinyPolicy, batch, build
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardcore import load_checkpoint, save_checkpoint, shard
from shardcore.checkpoint import Checkpoint
from shardcore.errors import AgreementError, CheckpointError

pytestmark = PIPELINES

#: The meshes, on four ranks.
MESHES: dict[str, dict[str, Any]] = {
    "stages": {"pp": 4},
    "tp": {"pp": 2, "tp": 2},
    "dp": {"pp": 2, "dp": 2, "pipeline_schedule": "zbv"},
    "bounds": {"pp": 2, "tp": 2, "pipeline_bounds": (0, 1, 4)},
    "without": {"tp": 4},
}


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def made(fields: dict[str, Any]) -> tuple[Any, torch.optim.Optimizer]:
    """Return a sharded model and its optimizer, of which a group is empty on some ranks."""
    model: Any = shard(build(layers=4, tied=True, dropout=0.0), policy=TinyPolicy, **fields)
    tables = [p for name, p in model.named_parameters() if "embed" in name or "head" in name]
    rest = [p for name, p in model.named_parameters() if "embed" not in name and "head" not in name]
    groups = [{"params": tables, "lr": 3e-3, "weight_decay": 0.0}, {"params": rest}]
    return model, torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)


def step(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> None:
    call = {"ids": batch(seed, 8, 6), "labels": batch(seed + 1, 8, 6)}
    if hasattr(model, "train_step"):
        model.train_step(call)
    else:
        model(**call).backward()
    optimizer.step()
    optimizer.zero_grad()


def goes_on(folder: str, saved: str, resumed: str) -> None:
    model, optimizer = made(MESHES[saved])
    for seed in range(2):
        step(model, optimizer, seed)
    save_checkpoint(folder, model, optimizer, step=2, extra={"note": saved})
    step(model, optimizer, 2)
    other, second = made(MESHES[resumed])
    second.param_groups[0]["lr"] = 1.0
    loaded = load_checkpoint(folder, other, second)
    assert (loaded.step, loaded.extra) == (2, {"note": saved})
    assert [group["lr"] for group in second.param_groups] == [3e-3, 1e-2]
    step(other, second, 2)
    # What both have on this rank; together the ranks have everything.
    parts, wanted = dict(other.named_parameters()), dict(model.named_parameters())
    if saved == resumed:
        assert parts.keys() == wanted.keys()
    reference = build(layers=4, tied=True)
    first = torch.optim.AdamW(
        [
            {"params": [reference.model.embed.weight], "lr": 3e-3, "weight_decay": 0.0},
            {"params": [p for name, p in reference.named_parameters() if "embed" not in name]},
        ],
        lr=1e-2,
        eps=1e-4,
    )
    for seed in range(3):
        step(reference, first, seed)
    true = dict(reference.named_parameters(remove_duplicate=False))
    for name, parameter in (*parts.items(), *wanted.items()):
        torch.testing.assert_close(whole(parameter), true[name].detach(), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [("tp", "tp"), ("tp", "stages"), ("stages", "dp"), ("dp", "bounds"), ("bounds", "without"), ("without", "tp")],
)
def test_a_training_goes_on(pool, tmp_path: Path, saved, resumed):
    pool.run(goes_on, str(tmp_path), saved, resumed, world=4)
    checkpoint = Checkpoint(tmp_path)  # by one process, without ranks
    names = set(build(layers=4, tied=True).state_dict())
    assert set(checkpoint.names()) == names
    assert all(bool(checkpoint.read(f"model.{name}").isfinite().all()) for name in names)
    once = {name.partition("model.layers.0.")[2] for name in checkpoint.names("optimizer.state.")} - {""}
    assert "attention.q_proj.weight.exp_avg" in once


def refused(folder: str) -> None:
    model, optimizer = made({"pp": 2})
    save_checkpoint(folder, model, optimizer, step=0)
    wider = shard(build(layers=4, vocab=90, tied=True), policy=TinyPolicy, pp=2)
    with pytest.raises((CheckpointError, AgreementError), match=r"weight has the shape \(97, 32\)"):
        load_checkpoint(folder, wider)
    longer = shard(build(layers=5, tied=True), policy=TinyPolicy, pp=2)
    with pytest.raises((CheckpointError, AgreementError), match=r"it lacks model.layers.4"):
        load_checkpoint(folder, longer)
    optimizer.param_groups[1]["weight_decay"] = float(dist.get_rank())
    with pytest.raises(AgreementError, match="the options of the optimizer"):
        save_checkpoint(folder, model, optimizer, step=1)


def test_what_differs_is_refused(pool, tmp_path: Path):
    pool.run(refused, str(tmp_path), world=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-0"]
