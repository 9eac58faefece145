"""DDP around a module that holds a sharded model is refused, in words that say what to do instead."""

from __future__ import annotations

import warnings

import pytest
import torch
from tiny import twins
from torch.nn.parallel import DistributedDataParallel

from shardcore.errors import WrapError


def wrapped():
    _, model = twins(fields={"tp": 2})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about its own arguments
        with pytest.raises(WrapError, match=r"a Sequential that holds a sharded Tiny.*leave DDP out"):
            DistributedDataParallel(torch.nn.Sequential(model))


def test_a_sharded_model_inside_of_another_module_says_what_to_do(pool):
    pool.run(wrapped, world=2)


def plain():
    """What is not sharded is wrapped as ever."""
    twins(fields={"tp": 2})
    linear = torch.nn.Linear(2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert DistributedDataParallel(linear).module is linear


def test_other_modules_are_wrapped(pool):
    pool.run(plain, world=2)
