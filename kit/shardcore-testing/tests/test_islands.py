"""What is computed in float32 whatever the model's dtype is computed in float64."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from island_net import CASE
from needs import TRACES
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardcore_testing import WorkerPool, no_float32_islands
from shardcore_testing.checks import examine
from shardcore_testing.islands import default_dtype, in_float64, without_islands
from shardcore_testing.subject import Subject

ISLANDS = [
    lambda x: x.float(),
    lambda x: x.to(torch.float32),
    lambda x: x.to(dtype=torch.float32),
    lambda x: x.to("cpu", torch.float32),
    lambda x: x.type(torch.float32),
    lambda x: F.softmax(x, dim=-1, dtype=torch.float32),
    lambda x: F.log_softmax(x, dim=-1, dtype=torch.float32),
    lambda x: torch.softmax(x, -1, torch.float32),
    lambda x: x.softmax(-1, dtype=torch.float32),
    lambda x: x.mean(-1, dtype=torch.float32),
    lambda x: torch.sum(x, dtype=torch.float32),
    lambda x: torch.zeros_like(x, dtype=torch.float32),
]


@pytest.mark.parametrize("island", ISLANDS)
def test_float64_stays(island):
    x = torch.rand(2, 3, dtype=torch.float64)
    with no_float32_islands():
        assert island(x).dtype == torch.float64
        assert island(x.bfloat16()).dtype == torch.float32
    assert island(x).dtype == torch.float32


def test_what_is_no_island_is_left_alone():
    native = torch.Tensor.float, torch.Tensor.to, F.softmax, torch.softmax, nn.Module._apply
    x = torch.rand(2, 3, dtype=torch.float64)
    with no_float32_islands(), no_float32_islands():
        assert nn.Linear(2, 2).double().float().weight.dtype == torch.float32
        assert nn.Linear(2, 2).double().to(torch.float32).weight.dtype == torch.float32
        assert torch.arange(3).float().dtype == torch.float32
        assert x.to(torch.bfloat16).dtype == torch.bfloat16
        # Positions that were made float beside frequencies that stayed.
        assert (x.float() @ torch.arange(3).float()).dtype == torch.float64
    assert native == (torch.Tensor.float, torch.Tensor.to, F.softmax, torch.softmax, nn.Module._apply)


def scripted(x: torch.Tensor, dtype: torch.dtype):
    return F.softmax(x.to(dtype), dim=-1)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # deprecated, in one way or another
def test_torchscript_compiles_torchs_own_functions():
    x = torch.rand(2, 3, dtype=torch.float64)
    with no_float32_islands():
        compiled = torch.jit.script(scripted)
        assert compiled(x, torch.float32).dtype == torch.float32
        assert F.softmax(x, dim=-1, dtype=torch.float32).dtype == torch.float64
    assert torch.equal(compiled(x, torch.float64), x.softmax(-1))


class Calling(torch.overrides.TorchFunctionMode):
    """Inside a mode, torch.compile sees a method of a tensor as a function."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def converted(x):
    with Calling():
        return x.to(torch.float64).sum()


def graphs_inside_and_after():
    import torch._dynamo

    counts = []
    for context in (no_float32_islands(), nullcontext()):
        torch._dynamo.reset()
        with context:
            counts.append(torch._dynamo.explain(converted)(torch.rand(2)).graph_count)
    return counts


@pytest.mark.nightly
@TRACES
@pytest.mark.filterwarnings("ignore")  # torch warns of what it cannot compile
def test_functions_compile_afterwards():
    # In a process of its own: what torch.compile first takes for the methods of a tensor it remembers.
    with WorkerPool() as pool:
        assert pool.run(graphs_inside_and_after, world=1) == [[0, 1]]


def test_an_exception_ends_it():
    with pytest.raises(ZeroDivisionError), no_float32_islands():
        raise ZeroDivisionError
    assert not without_islands()
    assert torch.rand(2, dtype=torch.float64).float().dtype == torch.float32


def test_what_is_made_of_integers_and_of_nothing_is_in_float64_by_default():
    with in_float64():
        ones, zeros = torch.ones(2, dtype=torch.long), torch.zeros(2, dtype=torch.float32)
        made = [ones.float(), zeros, torch.as_tensor(ones, dtype=torch.float32), torch.full((), 1.0)]
        with torch.device("meta"):
            assert torch.zeros(2).is_meta
        made.append(nn.Linear(2, 2).to(torch.float32).weight)  # a router that converts itself in its forward
        with default_dtype(torch.float32):
            assert nn.Linear(2, 2).double().float().weight.dtype == torch.float32
    assert {each.dtype for each in made} == {torch.float64}
    assert torch.zeros(2).dtype == torch.float32


def recomputed():
    dtypes = []
    x = torch.rand(2, dtype=torch.float64, requires_grad=True)
    checkpoint(lambda y: (dtypes.append(y.float().dtype), y.float() * y)[1], x, use_reentrant=False).sum().backward()
    return dtypes


def test_ranks_are_inside_if_their_caller_is(pool):
    assert pool.run(recomputed) == [[torch.float32] * 2] * 2
    with no_float32_islands():
        assert pool.run(recomputed) == [[torch.float64] * 2] * 2
    assert pool.run(recomputed) == [[torch.float32] * 2] * 2


@no_float32_islands()
def decorated():
    return without_islands()


def test_it_decorates_what_ranks_run(pool):
    assert pool.run(decorated) == [torch.get_default_dtype()] * 2


def test_the_kit_compares_models_with_islands_in_float64(pool):
    # With the island, what the ranks add up is rounded to 1e-8 in places that depend on the processor.
    findings = {finding.check: finding for finding in examine(pool, Subject(case=CASE, tp=2), "training")}
    assert {finding.state for finding in findings.values()} == {"passed"}, findings
    assert findings["gradients"].error < 1e-13
