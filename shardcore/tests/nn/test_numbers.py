"""A number that is taken out of a partial DTensor is one rank's, and the line that takes it is told so."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
from tiny import batch, twins

import shardcore
from shardcore import ShardcoreWarning
from shardcore_testing.parity import assert_close

WORDS = r"this is the number of one rank's part.*full_tensor\(\)\.item\(\).*shardcore\.grad_norm\(model\)"


def taken():
    reference, model = twins(fields={"tp": 2})
    for each in (reference, model):
        each(batch(), labels=batch()).backward()
    weight, grad = model.head.weight, model.head.weight.grad
    wanted = reference.head.weight.grad
    lines = {
        "norm": lambda: grad.norm().item(),
        "float": lambda: float(grad.norm()),
        "sum": lambda: weight.sum().item(),
        "max": lambda: weight.abs().max().item(),
        "bool": lambda: bool(grad.isnan().any()),
        "penalty": lambda: sum(p.pow(2).sum() for p in model.parameters()).item(),
    }
    # Numbers that some releases of torch ask the other ranks for: 2.14 the one, 2.11 the other.
    asked = {"bool": grad.isnan().any(), "penalty": sum(p.pow(2).sum() for p in model.parameters())}
    for name, number in asked.items():
        if not any(way.is_partial() for way in number.placements):
            del lines[name]
    for name, line in lines.items():
        with pytest.warns(ShardcoreWarning, match=WORDS) as caught:
            line()
        assert caught[0].filename == __file__, name
        assert caught[0].lineno == inspect.getsourcelines(line)[1], name
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_close(wanted.norm(), torch.tensor(grad.norm().full_tensor().item(), dtype=torch.float64), "norm")
        # Not a line of the user: these add up what the ranks have.
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()
        assert norm == pytest.approx(torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1).item(), rel=1e-12)
        assert shardcore.grad_norm(model).item() == pytest.approx(shardcore.grad_norm(reference).item(), rel=1e-12)
        assert weight[3, 2].item() == reference.head.weight[3, 2].item()
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.step()


def test_a_line_that_takes_one_ranks_number_is_told(pool):
    pool.run(taken, world=2)


def alone():
    """On one rank the part is the whole."""
    _, model = twins(fields={"tp": 1})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sum(p.pow(2).sum() for p in model.parameters()).item()


def test_one_rank_hears_nothing(pool):
    pool.run(alone, world=1)


def once():
    _, model = twins(fields={"tp": 2})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for p in model.parameters():
            p.norm().item()
    return len(caught)


def test_a_loop_is_told_once(pool):
    assert pool.run(once, world=2) == [1, 1]
