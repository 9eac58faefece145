"""Planning takes time in proportion to the number of modules: thousands of experts are planned in seconds."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn

from shardcore import Policy, ShardConfig, compile_plan
from shardcore.styles import region, sequence


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gate(x) * self.up(x))


class Block(nn.Module):
    def __init__(self, experts: int):
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        return sum(expert(x) for expert in self.experts)


class Experts(nn.Module):
    def __init__(self, blocks: int, experts: int):
        super().__init__()
        self.layers = nn.ModuleList(Block(experts) for _ in range(blocks))


class ExpertsPolicy(Policy):
    def module_policy(self):
        return {
            "Experts": [sequence(scatter="layers[0]", gather="layers[-1]")],
            "Expert": [region(enter="", col=("gate", "up"), row="down")],
        }


class EntersAlone(Policy):
    def module_policy(self):
        return {"Expert": [region(col=("gate", "up"), row="down")]}


def seconds(policy: type[Policy], blocks: int, **fields: object) -> float:
    """Return the processor time that planning and printing takes, of the fastest of three."""
    with torch.device("meta"):
        model = Experts(blocks, 16)
    config = ShardConfig(tensor_parallel_size=2, **fields)
    taken = []
    for _ in range(3):
        start = time.process_time()
        plan = compile_plan(policy, model, config)
        plan.render()
        taken.append(time.process_time() - start)
    assert len(plan.steps) >= blocks * 16 * 3
    return min(taken)


@pytest.mark.nightly
def test_time_is_proportional_to_the_number_of_modules():
    for policy, fields in (
        (ExpertsPolicy, {}),
        (ExpertsPolicy, {"enable_sequence_parallelism": True}),
        (EntersAlone, {}),
    ):
        # Eight times as many modules: a quadratic part would soon take 64 times as long.
        few, many = (seconds(policy, blocks, **fields) for blocks in (8, 64))
        assert many / few < 16, (policy, fields, few, many)
