"""Random numbers are not drawn into sharded tensors on CPUs: each rank would draw by its own."""

from __future__ import annotations

import warnings

import pytest
import torch
from tiny import twins
from torch import nn

from shardcore import NotSupportedError
from shardcore_testing.parity import assert_same_parameters

WORDS = (
    r"of a sharded tensor \(97, 32\) on CPUs.*Nothing was changed.*"
    r"before shard\(\).*shardcore\.initialize\(model\).*load_state_dict\(\{name: tensor\}, strict=False\)"
)

DRAWS = {
    "normal": nn.init.normal_,
    "uniform": nn.init.uniform_,
    "truncated": nn.init.trunc_normal_,
    "kaiming": nn.init.kaiming_uniform_,
    "xavier": nn.init.xavier_normal_,
    "bernoulli": lambda p: p.bernoulli_(0.5),
    "bernoulli of a tensor": lambda p: p.bernoulli_(p.detach().abs().clamp(max=1)),
    "exponential": lambda p: p.exponential_(),
    "cauchy": lambda p: p.cauchy_(),
    "geometric": lambda p: p.geometric_(0.5),
    "log normal": lambda p: p.log_normal_(),
    "random": lambda p: p.random_(),
    "random to": lambda p: p.random_(5),
    "random from to": lambda p: p.random_(2, 5),
    "of the data": lambda p: p.data.normal_(generator=torch.Generator().manual_seed(0)),
}


def refused():
    reference, model = twins(fields={"tp": 2})
    for name, draw in DRAWS.items():
        with torch.no_grad(), pytest.raises(NotSupportedError, match=WORDS) as caught:
            draw(model.head.weight)
        assert caught.value.args[0].split()[0].endswith("_"), name
    with pytest.raises(NotSupportedError, match=r"normal_ of a sharded tensor \(32,\)"):
        nn.init.normal_(model.model.norm.weight)  # every rank has the whole
    assert_same_parameters(reference, model)
    for each in (reference, model):
        nn.init.zeros_(each.head.weight)
        nn.init.constant_(each.model.norm.weight, 0.5)
    assert_same_parameters(reference, model)


def test_no_rank_draws_by_its_own(pool):
    pool.run(refused, world=2)


def allowed():
    """One rank has the whole; a part on the meta device has no numbers."""
    reference, model = twins(fields={"tp": 1})
    for each in (reference, model):
        for name, draw in DRAWS.items():
            torch.manual_seed(3)
            with torch.no_grad():
                draw(each.head.weight)
            if "of a tensor" not in name:
                nn.init.normal_(each.model.norm.weight)
    assert_same_parameters(reference, model)


def test_one_rank_draws(pool):
    pool.run(allowed, world=1)


def on_meta():
    _, model = twins(fields={"tp": 2})
    model.to("meta")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of CPUs
        nn.init.normal_(model.head.weight)
    assert model.head.weight.is_meta


def test_on_the_meta_device_nothing_is_drawn(pool):
    pool.run(on_meta, world=2)
