"""What tests compare with: gradients and parameters of a sharded model, and the collectives that it runs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from shardcore_testing.observing import Collectives
from shardcore_testing.pack import step_beside
from shardcore_testing.parity import assert_same_parameters, equal_on_ranks, parameter_errors

LAYOUTS = {"weight": [Shard(0)], "bias": [Replicate()]}


def _pair(size: int = 5) -> tuple[nn.Module, nn.Module]:
    """Return a linear of 4 inputs and its copy, split by rows unevenly, with a replicated bias."""
    torch.manual_seed(3)
    reference = nn.Linear(4, size).double()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = nn.Linear(4, size).double()
    for name, parameter in reference.named_parameters():
        split = distribute_tensor(parameter.detach().clone(), mesh, LAYOUTS[name], src_data_rank=None)
        setattr(sharded, name, nn.Parameter(split))
    return reference, sharded


def _differing(name: str, rank: int, by: float) -> dict[str, float]:
    reference, sharded = _pair()
    assert_same_parameters(reference, sharded, 0.0)
    if dist.get_rank() == rank:
        with torch.no_grad():
            getattr(sharded, name).to_local()[-1] += by
    return parameter_errors(reference, sharded)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("by", [1e-6, float("nan")])
def test_what_one_rank_holds_is_an_error_on_all(pool, name, rank, by):
    for errors in pool.run(_differing, name, rank, by, world=2):
        assert not errors.pop(name) < 1e-7
        assert set(errors.values()) == {0.0}


def _another_part() -> dict[str, float]:
    reference, sharded = _pair()
    part = sharded.weight.detach().to_local()
    mesh = sharded.weight.device_mesh
    lost = DTensor.from_local(part[:-1], mesh, [Shard(0)], run_check=False, shape=(5, 4), stride=(4, 1))
    sharded.weight = nn.Parameter(lost)
    return parameter_errors(reference, sharded)


def test_a_part_of_another_size_is_an_error(pool):
    for errors in pool.run(_another_part, world=2):
        assert errors == {"weight": float("inf"), "bias": 0.0}


def _sums() -> dict[str, float]:
    reference, sharded = _pair()
    mesh = sharded.weight.device_mesh
    summand = reference.bias.detach() / 2
    sharded.bias = nn.Parameter(DTensor.from_local(summand, mesh, [Partial()], run_check=False))
    return parameter_errors(reference, sharded)


def test_sums_that_nobody_has_added_up_are_added_up(pool):
    for errors in pool.run(_sums, world=2):
        assert all(error < 1e-15 for error in errors.values())


def _two_axes() -> dict[str, float]:
    torch.manual_seed(3)
    reference, sharded = nn.Linear(5, 7).double(), nn.Linear(5, 7).double()
    mesh = init_device_mesh("cpu", (2, 2))
    layouts = {"weight": [Shard(0), Shard(0)], "bias": [Replicate(), Shard(0)]}
    for name, parameter in reference.named_parameters():
        split = distribute_tensor(parameter.detach().clone(), mesh, layouts[name], src_data_rank=None)
        setattr(sharded, name, nn.Parameter(split))
    assert_same_parameters(reference, sharded, 0.0)
    if dist.get_rank() == 2:
        with torch.no_grad():
            sharded.bias.to_local()[0] += 1
    return parameter_errors(reference, sharded)


def test_all_ranks_of_a_mesh_of_two_axes_are_compared(pool):
    for errors in pool.run(_two_axes, world=4):
        assert errors["weight"] == 0
        assert errors["bias"] > 1


def _count() -> list[int]:
    counts = []
    reference, sharded = _pair()
    with Collectives() as sent:
        parameter_errors(reference, sharded)
        counts.append(sent.take())
        parameter_errors(
            nn.Sequential(reference, nn.Sequential(reference)), nn.Sequential(sharded, nn.Sequential(sharded))
        )
        counts.append(sent.take())
    return counts


def test_a_comparison_costs_one_collective(pool):
    assert pool.run(_count, world=2) == [[1, 1]] * 2


def _unequal(rank: int) -> tuple[bool, bool]:
    tensor = torch.ones(3)
    same = equal_on_ranks(tensor)
    tensor[1] += 1e-7 * (dist.get_rank() == rank)
    return same, equal_on_ranks(tensor)


def test_bits_are_compared_on_all_ranks(pool):
    assert pool.run(_unequal, 1, world=2) == [(True, False)] * 2


def _kinds() -> dict[str, tuple[list[str], list[int]]]:
    group, x = dist.group.WORLD, torch.ones(4, 2, dtype=torch.float64)
    mesh = init_device_mesh("cpu", (2,))
    partial = DTensor.from_local(x, mesh, [Partial()], run_check=False)
    split = DTensor.from_local(x, mesh, [Shard(0)], run_check=False)
    calls = {
        "in place": lambda: dist.all_reduce(x.clone()),
        "sent in place": lambda: dist.broadcast(x.clone(), 0),
        "functional": lambda: functional.wait_tensor(functional.all_reduce(x, "sum", group)),
        "of a DTensor": partial.full_tensor,
        "gather of a DTensor": split.full_tensor,
        "both ways": lambda: _backward(x, group),
    }
    found = {}
    for name, call in calls.items():
        with Collectives() as sent:
            call()
            found[name] = (list(sent.counts.elements()), list(sent.bytes))
            assert sent.take() == len(found[name][0])
            assert sent.count == 0
    return found


def _backward(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    functional.all_reduce(x.clone().requires_grad_(), "sum", group).sum().backward()


def test_each_collective_counts_once(pool):
    assert pool.run(_kinds, world=2)[0] == {
        "in place": (["allreduce"], [64]),
        "sent in place": (["broadcast"], [64]),
        "functional": (["all_reduce"], [64]),
        "of a DTensor": (["all_reduce"], [64]),
        "gather of a DTensor": (["all_gather_into_tensor"], [128]),
        "both ways": (["all_reduce", "all_reduce"], [64, 64]),
    }


class _Model(nn.Linear):
    """Returns its result by name, off by ``by``."""

    def __init__(self, by: float = 0.0, name: str = "logits") -> None:
        torch.manual_seed(3)
        super().__init__(4, 5, dtype=torch.float64)
        self.by, self.name = by, name

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        out = super().forward(x)
        return {"loss": out.square().sum(), self.name: out + self.by}


@pytest.mark.parametrize(
    ("other", "says"), [(_Model(by=1e-9), "logits: relative difference"), (_Model(name="scores"), "returned were")]
)
def test_a_step_beside_notices_other_outputs(other, says):
    call = {"inputs": {"x": torch.ones(2, 4, dtype=torch.float64)}, "loss": lambda out: out["loss"]}
    reference, same = _Model(), _Model()
    step_beside(reference, same, **call)
    assert torch.equal(reference.weight.grad, same.weight.grad)
    with pytest.raises(AssertionError, match=says):
        step_beside(_Model(), other, **call)
