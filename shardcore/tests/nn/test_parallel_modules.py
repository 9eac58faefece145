"""Parallel modules alone, as `from_native_module` makes them: the Shardformer way, without a policy."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from needs import TRACES
from tiny import randomize
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from shardcore.comm.collectives import chunk_bounds
from shardcore.errors import NotSupportedError, WrapError
from shardcore.nn import ColumnLinear, FusedColumnLinear, Replicated, RowLinear, VocabEmbedding
from shardcore_testing.observing import Collectives
from shardcore_testing.parity import assert_close, assert_same_gradients


def _filled(module, dtype=torch.float64):
    module = module.to(dtype)
    randomize(module)
    return module


def _x(*shape, seed=7, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _part(full, dim=-1):
    start, stop = chunk_bounds(full.size(dim), dist.get_world_size(), dist.get_rank())
    return full.narrow(dim, start, stop - start)


def _train(module, x, *, part=None):
    """Return output and input gradient of a loss that weighs every element differently."""
    x = x.clone().requires_grad_()
    out = module(x)
    weight = torch.linspace(-1, 2, out.size(-1) if part is None else part, dtype=out.dtype)
    weight = weight if part is None else _part(weight)
    (out.tanh() * weight).sum().backward()
    return out.detach(), x.grad


class Own(nn.Linear):
    """A user's subclass."""

    def __init__(self, *args):
        super().__init__(*args)
        self.note = "mine"

    def doubled(self, x):
        return self(x) * 2


def linears():
    group = dist.group.WORLD
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = _x(2, 5, 13)
    for where in (group, [group], mesh):
        native = _filled(nn.Linear(13, 10))
        column = copy.deepcopy(native)
        parallel = ColumnLinear.from_native_module(column, where)
        assert parallel is column, "the same object"
        wanted, gx = _train(native, x)
        got, own_gx = _train(parallel, x, part=10)
        assert_close(_part(wanted), got, "column")
        assert_close(gx, own_gx, "column's input gradient")
        assert_same_gradients(native, parallel)

        gathered = ColumnLinear.from_native_module(_filled(nn.Linear(13, 10)), where, gather_output=True)
        native.zero_grad()
        wanted, gx = _train(native, x)
        got, own_gx = _train(gathered, x)
        assert_close(wanted, got, "gathered")
        # What follows a gather is the same on all ranks; each sends back its own part, and enter sums them.
        assert_close(gx, own_gx, "gathered column's input gradient")
        assert_same_gradients(native, gathered)

        native = _filled(nn.Linear(13, 10))
        wanted, gx = _train(native, x)
        for parallel_input in (True, False):
            row = RowLinear.from_native_module(_filled(nn.Linear(13, 10)), where, parallel_input=parallel_input)
            got, own_gx = _train(row, _part(x) if parallel_input else x)
            assert_close(wanted, got, f"row, parallel_input={parallel_input}")
            assert_close(_part(gx) if parallel_input else gx, own_gx, "row's input gradient")
            assert_same_gradients(native, row)
        assert row.bias.placements == (Replicate(),)


def _pair(hidden=13, inner=10):
    return _filled(nn.Sequential(nn.Linear(hidden, inner), nn.GELU(), nn.Linear(inner, hidden)))


def _sharded(pair, where=None):
    ColumnLinear.from_native_module(pair[0], where or dist.group.WORLD)
    RowLinear.from_native_module(pair[2], where or dist.group.WORLD)
    return pair


def pairs():
    for bias in (True, False):
        native = _pair()
        if not bias:
            native[0].bias = native[2].bias = None
        sharded = _sharded(copy.deepcopy(native))
        for seed in (1, 2):  # two micro-batches
            x = _x(2, 5, 13, seed=seed)
            wanted, gx = _train(native, x)
            with Collectives() as counted:
                got, own_gx = _train(sharded, x)
            assert counted.counts == {"allreduce": 2}
            assert_close(wanted, got, "pair")
            assert_close(gx, own_gx, "pair's input gradient")
        assert_same_gradients(native, sharded)
        assert all(isinstance(p, DTensor) and isinstance(p.grad, DTensor) for p in sharded.parameters())
        with torch.no_grad():
            assert_close(native(x), sharded(x), "no_grad")


def low_precision():
    x = _x(4, 13, dtype=torch.float32)
    for autocast in (False, True):
        dtype = torch.float32 if autocast else torch.bfloat16
        native = _pair().to(dtype)
        sharded = _sharded(copy.deepcopy(native))
        results = []
        for model in (native, sharded):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                out = model(x.to(dtype))
            out.float().tanh().sum().backward()
            results.append(out)
        assert results[0].dtype == results[1].dtype == torch.bfloat16
        assert_close(results[0], results[1], f"autocast={autocast}", 3e-2)
        assert all(p.grad.dtype == dtype for p in sharded.parameters())
        assert_same_gradients(native, sharded, 3e-2)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            assert_close(native(x.to(dtype)), sharded(x.to(dtype)), "no_grad", 3e-2)


def stays_itself():
    calls = []
    module = _filled(Own(6, 8))
    module.mine = {"a": 1}
    module.register_forward_hook(lambda *_: calls.append("forward"))
    module.weight.tag = "kept"
    module.bias.requires_grad_(False)
    module.weight.grad = grad = torch.arange(48, dtype=module.weight.dtype).view(8, 6)
    ColumnLinear.from_native_module(module, dist.group.WORLD)
    assert torch.equal(module.weight.grad.full_tensor(), grad)
    assert isinstance(module, nn.Linear)
    assert isinstance(module, Own)
    assert isinstance(module, ColumnLinear)
    module.doubled(_x(2, 6)).sum().backward()
    assert (calls, module.mine, module.note, module.weight.tag) == (["forward"], {"a": 1}, "mine", "kept")
    assert module.bias.grad is None
    assert (module.in_features, module.out_features) == (6, 8), "the whole sizes"
    assert "tp=2" in repr(module)
    assert type(Own(2, 2)) is Own, "other instances keep their class"


def copies_and_pickles():
    pair = _sharded(_pair())
    clone = copy.deepcopy(pair)
    assert type(clone[0]) is type(pair[0])
    with torch.no_grad():
        clone[0].weight.zero_()
    assert float(pair[0].weight.full_tensor().detach().abs().min()) > 0
    x = _x(2, 13)
    _train(clone, x)
    assert pair[0].weight.grad is None
    assert clone[0].weight.grad is not None
    assert copy.copy(pair[0]).weight is pair[0].weight
    for save in (pickle.dumps, lambda m: torch.save(m, io.BytesIO())):
        with pytest.raises(WrapError, match="cannot be pickled") as caught:
            save(pair[0])
        assert "torch.distributed.checkpoint" in str(caught.value)
        assert "copy.deepcopy(model) works" in str(caught.value)


def siblings():
    native = nn.ModuleList(_filled(nn.Linear(13, n)) for n in (8, 4, 4))
    sharded = copy.deepcopy(native)
    for module in sharded:
        ColumnLinear.from_native_module(module, dist.group.WORLD)

    def loss(modules, x):
        return sum(m(x).tanh().sum() * (i + 1) for i, m in enumerate(modules))

    leaf = _x(2, 13)
    for x in (leaf, leaf.clone().requires_grad_()):
        native.zero_grad()
        sharded.zero_grad()
        h = x * 2
        wanted = h.detach().requires_grad_(x.requires_grad)
        loss(native, wanted).backward()
        got = h.detach().requires_grad_(x.requires_grad)
        with Collectives() as counted:
            loss(sharded, got).backward()
        assert counted.counts.get("allreduce", 0) == (3 if x.requires_grad else 0), "one enter for each"
        assert_same_gradients(native, sharded)
        if x.requires_grad:
            assert_close(wanted.grad, got.grad, "input gradient")


def embeddings(size):
    group, rank = dist.group.WORLD, dist.get_rank()
    for padding in (None, 1, size - 1):
        native = _filled(nn.Embedding(size, 6, padding_idx=padding))
        table = VocabEmbedding.from_native_module(copy.deepcopy(native), group)
        ids = torch.cat([torch.arange(size), torch.tensor([0, size - 1, 1])]).view(1, -1)
        for _ in range(2):
            wanted, got = native(ids), table(ids)
            assert_close(wanted, got, f"padding_idx={padding}")
            for out in (wanted, got):
                (out.tanh() * torch.arange(1.0, 7, dtype=torch.float64)).sum().backward()
        assert_same_gradients(native, table)
        if padding is not None:
            assert float(table.weight.grad.full_tensor()[padding].abs().max()) == 0
        for bad in (-1, size):
            with pytest.raises(IndexError, match=f"the table has {size} rows"):
                table(torch.tensor([0, bad]))
        assert table(torch.empty(1, 0, dtype=torch.int64)).shape == (1, 0, 6)
    start, stop = table.rows
    assert table.weight.to_local().shape == (stop - start, 6)
    assert f"rows={start}:{stop}" in repr(table), rank


def replicated():
    x = _x(3, 12)
    for native in (_filled(nn.LayerNorm(12)), _filled(nn.Linear(12, 2)), _filled(nn.RMSNorm(12))):
        module = Replicated.from_native_module(copy.deepcopy(native), dist.group.WORLD)
        for _ in range(2):
            wanted, gx = _train(native, x)
            with Collectives() as counted:
                got, own = _train(module, x)
            assert counted.count == 0
        assert_close(wanted, got, "output")
        assert_close(gx, own, "input gradient")
        assert_same_gradients(native, module)
        assert type(module).__name__ == type(native).__name__
        assert all(isinstance(p, DTensor) for p in module.parameters())
        with pytest.raises(RuntimeError):
            module(torch.zeros(3, 5, dtype=torch.float64))
        assert all(isinstance(p, DTensor) for p in module.parameters()), "put back after an exception"


def errors(world):
    group = dist.group.WORLD
    with pytest.raises(TypeError, match=r"ColumnLinear replaces torch.nn.modules.linear.Linear, got torch.nn.modules"):
        ColumnLinear.from_native_module(nn.LayerNorm(4), group)
    native = nn.Linear(6, 5)
    with pytest.raises(ValueError, match="out_features 5") as caught:
        ColumnLinear.from_native_module(native, group)
    assert str(caught.value) == (
        "Linear has out_features 5, which leaves the last of 4 ranks without any; replicate the module, or use at most "
        "5 ranks"
    )
    assert type(native) is nn.Linear
    assert not isinstance(native.weight, DTensor), "nothing was changed"
    with pytest.raises(ValueError, match="Linear has in_features 6, which leaves the last of 4 ranks without any"):
        RowLinear.from_native_module(native, group)
    with pytest.raises(ValueError, match="num_embeddings 5 leaves the last of 4 ranks without any row"):
        VocabEmbedding.from_native_module(nn.Embedding(5, 2), group)
    with pytest.raises(ValueError, match="an embedding with max_norm cannot be split"):
        VocabEmbedding.from_native_module(nn.Embedding(8, 2, max_norm=1.0), group)
    with pytest.raises(ValueError, match="out_features 6 cannot be shared by groups of 3 of 4 ranks"):
        ColumnLinear.from_native_module(nn.Linear(6, 6), group, replication=3)
    with pytest.raises(NotSupportedError, match="2 process groups were given; tensor parallelism here has one axis"):
        ColumnLinear.from_native_module(native, [group, group])
    assert world == dist.get_world_size()


def double_backward():
    pair = _sharded(_pair())
    with pytest.raises(NotSupportedError, match="create_graph=True"):
        torch.autograd.grad(pair(_x(2, 13)).pow(2).sum(), list(pair.parameters()), create_graph=True)


def random_state_after():
    """The pair may draw numbers; those that are drawn after it must agree on the ranks."""
    pair = _sharded(nn.Sequential(*_pair(), nn.Dropout(0.5)))
    torch.manual_seed(3)
    drawn = []
    for _ in range(3):
        pair(_x(2, 13))
        drawn += torch.rand(4).tolist()
    return drawn


def compiled():
    native = _pair()
    eager = _sharded(copy.deepcopy(native)).eval()  # in training, linears alone fork the random stream
    x = _x(2, 5, 13)
    wanted, gx = _train(native, x)
    got, own = _train(torch.compile(eager, backend="aot_eager", fullgraph=True), x)
    assert_close(wanted, got, "compiled")
    assert_close(gx, own, "compiled input gradient")
    assert_same_gradients(native, eager)


def basics():
    linears()
    pairs()
    replicated()
    siblings()


def surroundings():
    stays_itself()
    copies_and_pickles()
    low_precision()
    double_backward()


@pytest.mark.parametrize("world", [2, 4])
def test_forward_and_gradients(pool, world):
    pool.run(basics, world=world)


def test_embedding(pool):
    pool.run(embeddings, 97, world=2)
    pool.run(embeddings, 97, world=4)
    pool.run(embeddings, 5, world=3)


def test_modules_stay_what_they_were(pool):
    pool.run(surroundings, world=2)


def test_sizes_and_classes_that_cannot_be_split(pool):
    pool.run(errors, 4, world=4)


def test_random_numbers_agree_after_a_pair(pool):
    first, second = pool.run(random_state_after, world=2)
    assert first == second


@TRACES
@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")  # dynamo does
def test_compiled_equals_eager(pool):
    pool.run(compiled, world=2)


def test_fused_linears_refuse_an_older_torch(monkeypatch):
    monkeypatch.delattr("torch.distributed.tensor._dtensor_spec._StridedShardNotDecodableError", raising=False)
    monkeypatch.setattr("torch.__version__", "2.11.0")
    problem = FusedColumnLinear.problem(nn.Linear(8, 36), 2, segments=3)
    assert problem == (
        "torch 2.11.0 has no torch.distributed.tensor._dtensor_spec._StridedShardNotDecodableError, "
        "which torch has since 2.12: a private name, needed by linears that fuse several segments (full_tensor of such "
        "tensors). shardcore was tested with torch 2.11 to 2.14; install torch 2.12 or newer"
    )
