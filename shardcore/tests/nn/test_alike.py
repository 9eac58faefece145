"""Modules with a forward of their own are found to be linears, or lookups, by trying them, or are refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from own_products import InOut, Rewritten, Scaled
from torch import nn

from shardcore.nn.linear.alike import Product, lookup_problem, product_of


class BySuper(nn.Linear):
    def forward(self, x):
        return self.times(x)

    def times(self, x):
        return super().forward(x)


@pytest.mark.parametrize(
    ("module", "product"),
    [
        (nn.Linear(3, 5), Product(3, 5)),
        (Rewritten(3, 5), Product(3, 5)),
        (Rewritten(4, 4, bias=False), Product(4, 4)),
        (BySuper(5, 3), Product(5, 3)),
        (InOut(3, 5), Product(3, 5, transposed=True)),
        (InOut(6, 6), Product(6, 6, transposed=True)),
    ],
)
def test_what_multiplies(module, product):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert product_of(module) == product
    assert product_of(module.to("meta")) == product
    assert torch.get_rng_state().equal(before)
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
        assert product_of(type(module)(7, 9)) == Product(7, 9, product.transposed)


class Reads(nn.Linear):
    def forward(self, x):
        out = super().forward(x)
        return out if getattr(self, "adapter", None) is None else self.adapter(out)


class Trains(nn.Linear):
    def forward(self, x):
        return super().forward(F.dropout(x, 0.5) if self.training else x)


class Shifts(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1e-3


class Detaches(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.detach(), self.bias)


class Upcasts(nn.Linear):
    def forward(self, x):
        return F.linear(x.float(), self.weight.float()).to(x.dtype)


class Promotes(nn.Linear):
    def forward(self, x):
        return F.linear(x.double(), self.weight.double(), self.bias.double())


class ForgetsItsBias(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight)


class Normalizes(nn.Linear):
    def forward(self, x):
        return super().forward(x / x.norm())


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        (Reads, "it reads 'adapter' too"),
        (Trains, "it reads 'training' too"),
        (Shifts, "it returns other numbers"),
        (Detaches, "it has other gradients"),
        (Upcasts, "it returns other numbers"),
        (Promotes, "wanted (2, 5) of torch.float32"),
        (ForgetsItsBias, "it returns other numbers"),
        (Normalizes, "it returns other numbers"),
        (nn.Bilinear, "wanted a weight of two dims and a bias"),
    ],
)
def test_what_does_not(kind, cause):
    module = kind(3, 5, 2) if kind is nn.Bilinear else kind(3, 5)
    assert cause in product_of(module)


def test_a_class_is_tried_once_for_each_form(monkeypatch):
    calls = []

    class Counts(nn.Linear):
        def forward(self, x):
            calls.append(x.shape)
            return super().forward(x)

    for sizes in ((3, 5), (7, 11), (300, 2)):
        product_of(Counts(*sizes))
    assert 0 < len(calls) <= 9
    assert product_of(Counts(4, 4)) == Product(4, 4)
    assert len(calls) <= 18


class ByName(nn.Embedding):
    def forward(self, ids):
        return nn.Embedding.forward(self, ids) * 2


class ReadsItsTable(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) - self.weight.mean(0)


class LooksUp(nn.Embedding):
    def forward(self, ids):
        return F.embedding(ids, self.weight)


class DropsWords(nn.Embedding):
    def forward(self, ids):
        if self.training:
            return F.embedding(ids, F.dropout(self.weight, 0.1))
        return super().forward(ids)


class Never(nn.Embedding):
    def forward(self, ids):
        return torch.zeros(*ids.shape, self.embedding_dim)


class Normed(nn.Embedding):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.norm = nn.LayerNorm(sizes[1])

    def forward(self, ids):
        return self.norm(super().forward(ids))


def test_lookups_around_which_a_forward_can_run():
    assert lookup_problem(nn.Embedding(7, 3)) is None
    assert lookup_problem(Scaled(7, 3)) is None
    with torch.device("meta"):
        assert lookup_problem(Scaled(7, 3)) is None


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        (ByName, "must be Tensor"),
        (ReadsItsTable, "no attribute 'mean'"),
        (LooksUp, "must be Tensor"),
        (DropsWords, "dropout()"),
        (Never, "it does not call it"),
        (Normed, "it has modules of its own (norm)"),
    ],
)
def test_lookups_around_which_it_cannot(kind, cause):
    module = kind(7, 3)
    assert cause in lookup_problem(module)
    assert cause in lookup_problem(module.to("meta"))
    assert isinstance(module.weight, nn.Parameter)
