"""What writes into a slice that torch has gathered is refused; slices may be read, and written where they are views."""

from __future__ import annotations

import copy
import io
import operator
import warnings

import pytest
import torch
from tiny import batch, twins
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from shardcore import NotSupportedError
from shardcore_testing.parity import assert_close, assert_same_gradients, assert_same_parameters

WORDS = r"would write into a slice of a sharded tensor.*nothing was written.*distribute_tensor\(mask.*clone\(\)"

#: On a weight of 97 rows that are split; the second dim is whole.
LOST = {
    "rows": lambda p: p[5:9].zero_(),
    "rows times": lambda p: p[5:9].mul_(0),
    "a row": lambda p: p[3].zero_(),
    "a part of a row": lambda p: p[3][2:5].zero_(),
    "columns of rows": lambda p: p[5:9][:, 2].mul_(5),
    "columns of rows of columns": lambda p: p[:, 2:9][5:9][:, 1].add_(1),
    "narrow": lambda p: p.narrow(0, 3, 2).fill_(1.0),
    "chunk": lambda p: p.chunk(5)[1].zero_(),
    "split": lambda p: p.split([90, 7])[1].zero_(),
    "diagonal": lambda p: p.diagonal().zero_(),
    "transposed": lambda p: p.T[:, 3].mul_(2),
    "a new dim": lambda p: p[None][:, 3].zero_(),
    "detached": lambda p: p[5:9].detach().zero_(),
    "data of the rows": lambda p: p[5:9].data.zero_(),
    "rows of the data": lambda p: p.data[5:9].zero_(),
    "copy": lambda p: p[5:9].copy_(p[:4]),
    "an operator": lambda p: p[3].__iadd__(1),
    "out": lambda p: torch.mul(p[5:9], 2, out=p[5:9]),
    "several": lambda p: torch._foreach_mul_([p, p[5:9]], 2),
    "init": lambda p: nn.init.zeros_(p[5:9]),
    "an item of rows": lambda p: operator.setitem(p[5:9], 0, 1.0),
    "set rows": lambda p: operator.setitem(p, slice(5, 9), 0),
    "set a number": lambda p: operator.setitem(p, (3, 2), 1.0),
    "set a row": lambda p: operator.setitem(p.data, 3, p.data[4]),
    "set columns of rows": lambda p: operator.setitem(p, (slice(5, 9), ..., 2), p[5:9, 3]),
}
WRITTEN = {
    "columns": lambda p: p[:, 2].mul_(5),
    "columns of columns": lambda p: p[:, 2:9][:, 1].mul_(5),
    "a column of data": lambda p: p.data[:, 3].zero_(),
    "a clone": lambda p: p[5:9].clone().mul_(5),
    "all": lambda p: p[:].mul_(0.5),
    "split columns": lambda p: p.split(8, 1)[1].add_(1),
    "set a column": lambda p: operator.setitem(p, (slice(None), 4), p[:, 5]),
}
READ = {
    "rows": lambda p: p[5:9].pow(2).sum(),
    "a number": lambda p: torch.tensor(p[3, 2].item()),
    "rows of columns": lambda p: p[:, 3][7:9].sum(),
    "several": lambda p: torch.cat([p[5:9], p[:2] * p[1:3]]),
    "rows and the whole": lambda p: p[0] + p,
    "a copy": lambda p: p[5:9].clone().mul_(2),
    "made to need a gradient": lambda p: p[5:9].detach().requires_grad_(),
}


def whole(value):
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()


def refused():
    reference, model = twins(fields={"tp": 2})
    for each in (reference, model):
        each(batch(), labels=batch()).backward()
    head = model.head.weight
    for name, line in LOST.items():
        for tensor in (head, head.grad):
            try:
                with torch.no_grad(), pytest.raises(NotSupportedError, match=WORDS):
                    line(tensor)
            except BaseException as error:
                error.add_note(name)
                raise
    down = model.model.layers[0].mlp.down.weight  # its columns are split
    with torch.no_grad(), pytest.raises(NotSupportedError, match=r"^mul_ " + WORDS):
        down[:, 2].mul_(5)
    assert_same_parameters(reference, model)
    assert_same_gradients(reference, model)


def test_a_write_that_would_be_lost_is_refused(pool):
    pool.run(refused, world=2)


def allowed():
    reference, model = twins(fields={"tp": 2})
    pairs = [(reference.head.weight, model.head.weight), (reference.model.norm.weight, model.model.norm.weight)]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        for line in WRITTEN.values():
            for weight in pairs[0]:
                line(weight)
        for weight in pairs[1]:  # every rank has the whole
            weight[5:9].zero_()
            weight[3] = 7.0
        reference.model.layers[0].mlp.down.weight[5:9].zero_()
        model.model.layers[0].mlp.down.weight[5:9].zero_()
        assert_same_parameters(reference, model)
        for name, line in READ.items():
            found = [whole(line(weight)) for weight in pairs[0]]
            assert_close(*found, name)
    assert_same_parameters(reference, model)


def test_views_are_written_and_copies_are_read(pool):
    pool.run(allowed, world=2)


def trained():
    """Gradients go through slices, and those that a backward cuts out of others are clipped and stepped."""
    reference, model = twins(fields={"tp": 2})
    for each in (reference, model):
        weight = each.head.weight
        other = nn.Parameter(weight.detach() * 2)
        scale = torch.arange(194, dtype=torch.float64)[:, None].expand(194, 32).contiguous() / 100
        if isinstance(weight, DTensor):
            scale = distribute_tensor(scale, weight.device_mesh, weight.placements)
        # The gradient of both is split, and what is cut out of it for each is not.
        both = torch.cat([weight, other]) * scale
        total = (both.sum() + weight[5:9].pow(3).sum()) / 50
        (total.full_tensor() if isinstance(total, DTensor) else total).backward()
        optimizer = torch.optim.SGD([weight, other], lr=0.1)
        nn.utils.clip_grad_norm_([weight, other], 0.1)
        optimizer.step()
    assert_same_gradients(reference, model)
    assert_same_parameters(reference, model)


def test_gradients_of_slices_are_gradients(pool):
    pool.run(trained, world=2)


def saved():
    """A slice is copied and saved as the DTensor that it is."""
    _, model = twins(fields={"tp": 2})
    rows = model.head.weight.detach()[:4]
    torch.save(rows, buffer := io.BytesIO())
    other = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    assert type(other) is DTensor
    for each in (other, copy.deepcopy(rows)):
        assert_close(whole(rows), whole(each), "rows")


def test_a_slice_is_saved(pool):
    pool.run(saved, world=2)


def alone():
    """On one rank the slice is a view."""
    reference, model = twins(fields={"tp": 1})
    for each in (reference, model):
        with torch.no_grad():
            each.head.weight[5:9].zero_()
            each.head.weight[3, 2] = 1.0
    assert_same_parameters(reference, model)


def test_one_rank_writes(pool):
    pool.run(alone, world=1)
