"""State that is not weights comes back as it was, kinds included, and what cannot be stored is refused when saved."""

from __future__ import annotations

import collections
import json
import math
import random

import numpy as np
import pytest
import torch

from shardcore.checkpoint.values import decoded, encoded
from shardcore.errors import CheckpointError

_VALUES = {
    "plain": {"a": [1, 2.5, True, None, "x"], "b": {}},
    "integers as keys": {1: "one", (2, 3): "two"},
    "keys that look like marks": {"$tuple": 1, "$": 2},
    "tuples": ((1, 2), [(3,)], ()),
    "counter": collections.Counter({3: 2}),
    "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
    "sets": {1, 2},
    "deque": collections.deque([1, (2,)]),
    "bytes": b"\x00\xff",
    "large": 2**100,
    "infinite": [math.inf, -math.inf],
    "random": random.Random(3).getstate(),
}


@pytest.mark.parametrize("value", _VALUES.values(), ids=_VALUES)
def test_there_and_back(value):
    again = decoded(json.loads(json.dumps(encoded(value, "it"))))
    assert again == value
    assert type(again) is type(value)
    assert repr(again) == repr(value)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6, dtype=torch.bfloat16).view(2, 3).t(),
        torch.tensor(0.1, dtype=torch.float64),
        torch.empty(0, 3),
        torch.get_rng_state(),
        torch.tensor([True, False]),
        torch.nn.Parameter(torch.ones(2)),
    ],
)
def test_tensors(tensor):
    again = decoded(json.loads(json.dumps(encoded([tensor], "it"))))[0]
    assert again.dtype == tensor.dtype
    assert torch.equal(again, tensor)
    assert again.data_ptr() % 8 == 0
    again.add_(1) if again.is_floating_point() else None  # memory of its own


def test_arrays():
    state = np.random.RandomState(5).get_state()
    again = decoded(json.loads(json.dumps(encoded((state, np.float32(0.1), np.array(3)), "it"))))
    assert repr(again) == repr((state, np.float32(0.1), np.array(3)))
    np.random.RandomState().set_state(again[0])


class Own:
    pass


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": [Own()]}, r"it\['a'\]\[0\] is a .*Own, which cannot be stored as data"),
        (len, "it is a builtins.builtin_function_or_method"),
        (torch.empty(2, device="meta"), "only plain tensors with values"),
        (np.array([Own()]), "an array of object"),
        (bytes(2**24 + 1), "can be stored beside a model"),
        (type("Special", (dict,), {})(), "Special"),
    ],
)
def test_refused(value, words):
    with pytest.raises(CheckpointError, match=words):
        encoded(value, "it")


@pytest.mark.parametrize(
    "value", [{"$own": 1}, {"$tensor": ["save", [1], ""]}, {"$tuple": 3}, {"$array": ["O", [1], "0"]}]
)
def test_not_written_by_us(value):
    with pytest.raises(CheckpointError, match="cannot be read"):
        decoded(value)
