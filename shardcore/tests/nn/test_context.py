"""Where tokens are that are divided over ranks, and the modules and logits that know it."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shardcore.errors import NotSupportedError
from shardcore.nn.context.logits import DividedLogits
from shardcore.nn.context.modules import ContextEnd
from shardcore.nn.context.places import Places, total
from shardcore.nn.loss.cross_entropy import Vocabulary


@pytest.mark.parametrize(("heads", "rings", "zigzag"), list(itertools.product((1, 2, 3), (1, 2, 3), (False, True))))
def test_every_token_is_at_one_place(heads, rings, zigzag):
    for length in range(2 * heads * rings, 40):
        places = Places.of(length, heads, rings, zigzag=zigzag)
        at = sorted(t for spans in places.ranks for span in spans for t in range(*span))
        assert at == list(range(length))
        sizes = [total(spans) for spans in places.ranks]
        assert min(sizes) >= 1
        assert max(sizes) - min(sizes) <= 2


def test_work_is_even():
    """Where tokens see those before them alone, ranks of a ring look at about as many pairs of tokens."""
    places = Places.of(64, 1, 4, zigzag=True)
    pairs = [sum(token + 1 for span in spans for token in range(*span)) for spans in places.ranks]
    assert max(pairs) - min(pairs) <= 8 * 8
    apart = [
        sum(token + 1 for span in spans for token in range(*span)) for spans in Places.of(64, 1, 4, zigzag=False).ranks
    ]
    assert max(apart) > 3 * min(apart)


class _Named(nn.Module):
    def forward(self, x):
        return {"states": x}


def test_an_end_of_a_stack_that_returns_something_else():
    end = ContextEnd.swap_class(_Named(), None, shard=SimpleNamespace(divided=True, last=object()))
    with pytest.raises(NotSupportedError, match="_Named returns a dict, of which it is not known"):
        end(torch.ones(1, 2, 3))


@pytest.mark.parametrize("bias", [torch.ones(1), torch.ones(()), torch.ones(5), torch.ones(3, 4), 1.0])
def test_what_is_no_bias_of_words_is_not_added_to_divided_logits(bias):
    rows, vocabulary = torch.zeros(3, 4), Vocabulary(SimpleNamespace(size=1, rank=0), 4, 0)
    logits = DividedLogits(torch.arange(3).view(1, 3, 1), vocabulary, rows, None, None)
    with pytest.raises(NotSupportedError, match="an addition of anything but"):
        logits + bias
    assert (logits + torch.arange(4.0)).local.tolist() == [[0, 1, 2, 3]] * 3
