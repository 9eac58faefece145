"""What is recorded gives the values that the code itself gives: views, writes through them, and joins."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn

from shardcore.weights.boxes import Reader
from shardcore.weights.lazy import LazyTensor, recording
from shardcore.weights.recipes import Source, constant, evaluate, slices, whole_box


def views(x):
    x[1:3].zero_()
    x.t()[0] += 3
    y = x.view(2, -1)[1]
    y.mul_(2)
    return x


def swapped_rows(x):
    before = x[0].clone()
    x[0].copy_(x[1])
    x[1].copy_(before)
    return x


def own_part(x):
    x[0].copy_(x[1])  # a view is read and its base is written to
    return torch.stack([x[0], x[2]])


def old_view(x):
    row = x[0]
    old = row + 0
    x.add_(1)
    return old + row


def overwritten(x):
    view = x[0]
    x.zero_()
    x.add_(view + 1)
    return x


def copied_to_itself(x):
    x.copy_(x)
    x.copy_(x[...])
    x.copy_(x + 1)
    return x


def joined(x):
    a, b = x.split([1, 3])
    return torch.cat([b, a.expand(2, -1), x.permute(1, 0)[:, :4].contiguous()], 0)


def looked_at(x):
    return x * 2 if bool((x > 100).any()) else x + x.sum().item()


def as_data(x):
    p = nn.Parameter(torch.zeros(4, 4), requires_grad=False)
    p.data = x * 3
    p.data.add_(1)
    return p


def loop(x):
    for at in range(1200):  # deeper than Python's stack
        x[at % 4] += 1
    return x


PROGRAMS = [views, swapped_rows, own_part, old_view, overwritten, copied_to_itself, joined, looked_at, as_data, loop]


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs(program):
    start = torch.arange(16.0).view(4, 4)
    with torch.no_grad():
        wanted = program(start.clone())
        with recording(0):
            got = program(LazyTensor.of(constant(start)))
    assert isinstance(got, LazyTensor)
    assert torch.equal(got.evaluate(), wanted)
    assert torch.equal(got.evaluate(), wanted)  # what it is made from was not changed
    assert torch.equal(start, torch.arange(16.0).view(4, 4))


def test_what_is_drawn_follows_from_the_seed_and_the_code():
    def drawn(seed):
        with recording(seed):
            layer = nn.Linear(5, 3)
            nn.init.trunc_normal_(layer.bias, std=0.5)
            return [p.evaluate() for p in (layer.weight, layer.bias, torch.randperm(9), torch.randn(4))]

    torch.manual_seed(1)
    one = drawn(7)
    state = torch.get_rng_state()
    torch.manual_seed(2)
    two = drawn(7)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(one, drawn(8), strict=True))
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)  # the user's generator is not drawn from


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_comes_from_integers_has_the_default_dtype_of_the_code(dtype):
    def positions():  # of GPT-J, which a library builds in the dtype that it loads
        steps = 1.0 / (10000 ** (torch.arange(0, 8, 2) / 8))
        return torch.einsum("i,j->ij", torch.arange(6).float(), steps).float()

    torch.set_default_dtype(dtype)
    try:
        wanted = positions()
        with recording(0):
            lazy = positions()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(lazy.evaluate(), wanted)
    assert torch.get_default_dtype() is torch.float32


def test_initialisations_have_their_distributions():
    with recording(0):
        tensors = [torch.empty(300, 300) for _ in range(4)]
        nn.init.normal_(tensors[0], std=0.3)
        nn.init.trunc_normal_(tensors[1], std=0.3)
        nn.init.kaiming_uniform_(tensors[2])
        nn.init.orthogonal_(tensors[3])
    normal, truncated, uniform, orthogonal = (tensor.evaluate() for tensor in tensors)
    assert abs(normal.std() - 0.3) < 0.01
    assert abs(truncated.std() - 0.3) < 0.01
    assert uniform.abs().max() <= (6 / 300) ** 0.5
    torch.testing.assert_close(orthogonal @ orthogonal.t(), torch.eye(300), atol=1e-4, rtol=0)


def test_values_that_are_overwritten_are_not_made():
    drawn = []
    source = Source((2, 2), torch.float32, lambda box: drawn.append(box) or torch.ones(2, 2)[slices(box)])
    lazy = LazyTensor.of(source)
    lazy.zero_()
    assert torch.equal(lazy.evaluate(), torch.zeros(2, 2))
    assert not drawn


def test_parameters_stay_parameters():
    with recording(0):
        layer = nn.Linear(2, 3)
        twin = copy.deepcopy(layer)
        again = type(layer.weight)(layer.weight, requires_grad=False)
    for parameter in (layer.weight, twin.weight, again):
        assert isinstance(parameter, nn.Parameter)
        assert isinstance(parameter, LazyTensor)
    assert not again.requires_grad
    assert torch.equal(twin.weight.evaluate(), layer.weight.evaluate())
    with torch.no_grad():
        layer.weight.zero_()
    assert twin.weight.evaluate().any()
    with pytest.raises(RuntimeError, match="without values"):
        layer.weight.data = torch.zeros(3, 2)


def test_errors_are_those_of_the_code():
    with recording(0), pytest.raises(RuntimeError, match="shape"):
        torch.empty(3, 4) @ torch.empty(3, 4)
    with recording(0), pytest.raises(NotImplementedError, match="form of a tensor in place"):
        torch.empty(3, 4).t_()


def test_real_and_meta_tensors_are_written_as_ever():
    with recording(0):
        lazy = torch.ones(3)
    real = torch.zeros(3)
    with recording(0), torch.no_grad():
        real.copy_(lazy)
        meta = torch.empty(3, device="meta").copy_(lazy)
    assert torch.equal(real, torch.ones(3))
    assert type(meta) is torch.Tensor
    assert meta.is_meta


# Boxes.

FULL = torch.arange(2 * 3 * 4 * 6.0).view(2, 3, 4, 6)

FOLLOWED = {
    "itself": lambda x: x[...],
    "cast": lambda x: x.to(torch.bfloat16).to(torch.float64),
    "copied": lambda x: x.detach().clone().contiguous(),
    "transposed": lambda x: x.transpose(1, -1),
    "permuted": lambda x: x.permute(2, 0, 3, 1),
    "turned": lambda x: x[0, 0].t(),
    "sliced": lambda x: x[:, -2:, 1:100],
    "selected": lambda x: x[1, :, -1],
    "unsqueezed": lambda x: x.unsqueeze(-1).unsqueeze(1),
    "split": lambda x: x.split(4, -1)[1],
    "split unevenly": lambda x: x.split([1, 3, 2], -1)[1],
    "chunked": lambda x: x.chunk(3, 1)[2],
    "joined": lambda x: torch.cat([x[:1], x, x[1:]], 0),
    "stacked": lambda x: torch.stack([x[0], x[1], x[0]], 1),
    "experts": lambda x: torch.stack([torch.cat([x[e, 0], x[e, 1]], 0) for e in (0, 1)], 0),
    "overwriting": lambda x: torch.empty(2, 3, 4, 6, dtype=torch.float64).copy_(x),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_boxes(name):
    read = []

    def part(box):
        read.append(1)
        for (start, stop), size in zip(box, FULL.shape, strict=True):
            assert 0 <= start < stop <= size
        count.append(FULL[slices(box)].numel())
        return FULL[slices(box)]

    count: list[int] = []
    with recording(0):
        got = FOLLOWED[name](LazyTensor.of(Source(tuple(FULL.shape), FULL.dtype, part)))
    wanted = FOLLOWED[name](FULL)
    assert got.shape == wanted.shape
    draw = random.Random(name)
    for _ in range(40):
        box = tuple(tuple(sorted(draw.sample(range(size + 1), 2))) for size in wanted.shape)
        count.clear()
        reader = Reader()
        assert torch.equal(reader.read(got.recipe, box), wanted[slices(box)])
        assert sum(count) == wanted[slices(box)].numel()  # and nothing else was read
        assert not reader._full


def test_what_cannot_be_followed_is_made_once():
    reads = []

    def part(box):
        reads.append(box)
        return FULL[slices(box)]

    lazy = LazyTensor.of(Source(tuple(FULL.shape), FULL.dtype, part))
    recipe = (lazy.flip(0) * 2).recipe
    reader = Reader()
    for box in (whole_box(FULL.shape), ((0, 1), (1, 2), (0, 4), (2, 3))):
        assert torch.equal(reader.read(recipe, box), (FULL.flip(0) * 2)[slices(box)])
    assert len(reads) == 1
    assert torch.equal(evaluate(recipe), FULL.flip(0) * 2)


KEPT = {
    "itself": lambda x: x,
    "parameter": lambda x: nn.Parameter(x.detach()),
    "copied": lambda x: torch.empty(x.shape).copy_(x),
    "expert": lambda x: x[1],
    "other dtype": lambda x: x.double(),
    "computed": lambda x: x * 2,
    "joined": lambda x: torch.cat([x, x.clone()]),
    "turned": lambda x: x.transpose(0, 1),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_where_it_lies(name):
    """A part in one piece of a mapped file stays there; whatever has to be made is not, and nothing is looked at."""
    looked: list[object] = []

    def look(box):
        looked.append(box)
        return FULL[slices(box)]

    with recording(0):
        made = KEPT[name](LazyTensor.of(Source(tuple(FULL.shape), FULL.dtype, look, lambda box: FULL[slices(box)])))
    first = ((0, 1), *((0, size) for size in made.shape[1:]))
    kept = Reader().kept(made.recipe, first)
    assert looked == []
    if name in ("itself", "parameter", "copied", "expert", "joined"):  # of joined ones this part is in the first
        assert kept is not None
        assert kept.untyped_storage().data_ptr() == FULL.untyped_storage().data_ptr()
        assert torch.equal(kept, KEPT[name](FULL)[:1])
    else:
        assert kept is None
    middle = (*((0, size) for size in made.shape[:-1]), (1, 2))
    assert Reader().kept(made.recipe, middle) is None, "columns lie in pieces"
    unmapped = LazyTensor.of(Source(tuple(FULL.shape), FULL.dtype, look))
    assert Reader().kept(unmapped.recipe, whole_box(FULL.shape)) is None
    assert looked == []
