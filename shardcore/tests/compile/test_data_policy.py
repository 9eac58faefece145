"""Policies written as data: what words become, and every refusal. That of a Llama is compared in its pack."""

from __future__ import annotations

import copy
import types

import pytest
import torch
from tiny import FixedViewsPolicy, batch, build
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel

import shardcore
from shardcore.compile import compile_plan
from shardcore.errors import ConfigError, PlanError
from shardcore.nn import RowLinear
from shardcore.plan.steps.modules import Swap
from shardcore.plan.steps.regions import EnterRegion
from shardcore.policy import Heads, Stages
from shardcore.styles import region
from shardcore_testing.parity import assert_close, assert_same_gradients

TINY = {
    "model.embed": "embedding_rowwise",
    "model.layers.*.attention.?_proj".replace("?", "*"): "colwise",
    "model.layers.*.attention.*_norm": "replicated_with_grad_allreduce",
    "model.layers.*.mlp": "pairwise",
    "head": "colwise_gather_output",
    "": Stages(first=("embed", "positions"), blocks="layers", last="norm").under("model", then="head"),
}
# A part of a name may be a star; the row linear is named apart.
TINY |= {f"model.layers.*.attention.{name}_proj": "colwise" for name in "qkv"}
del TINY["model.layers.*.attention.*_proj"]
TINY["model.layers.*.attention.o_proj"] = "rowwise"


def plan(model, data, ranks=2, **fields):
    return compile_plan(data, model, shardcore.ShardConfig(tensor_parallel_size=ranks, **fields))


def problems(model, data, ranks=2, **fields):
    with pytest.raises(PlanError) as caught:
        plan(model, data, ranks, **fields)
    return caught.value.problems


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_plan_of_a_class_of_policies(ranks):
    model = build(fixed_views=True)
    config = shardcore.ShardConfig(tensor_parallel_size=ranks)
    written, by_class = plan(model, TINY, ranks), compile_plan(FixedViewsPolicy, model, config)
    assert sorted(str(written).splitlines()[1:]) == sorted(str(by_class).splitlines()[1:])


def trains():
    for kv_heads in (1, 2, 8):
        reference = build(fixed_views=True, kv_heads=kv_heads)
        sharded = shardcore.shard(copy.deepcopy(reference), policy=TINY)
        for model in (reference, sharded):
            model(batch(), labels=batch().roll(1, 1)).backward()
        assert_same_gradients(reference, sharded)
        assert_close(reference(batch()), sharded(batch()), "logits")


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_gradients(pool, ranks):
    pool.run(trains, world=ranks)


class Mlp(nn.Module):
    def __init__(self, act=torch.relu, size=8, inner=12):
        super().__init__()
        self.up, self.down, self.act = nn.Linear(size, inner), nn.Linear(inner, size), act

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Leaking(Mlp):
    def forward(self, x):
        inner = self.act(self.up(x))
        return self.down(inner), inner.sum(-1)


class Attention(nn.Module):
    """Attention of 4 heads of 2 features."""

    def __init__(self, fused=False, **numbers):
        super().__init__()
        self.__dict__.update(numbers)
        for name in ("qkv",) if fused else "qkv":
            self.add_module(name, nn.Linear(8, 24 if fused else 8))
        self.o = nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = (m(x).unflatten(-1, (-1, 2)).transpose(1, 2) for m in (self.q, self.k, self.v))
        return self.o((q @ k.mT).softmax(-1).matmul(v).transpose(1, 2).flatten(2))


class Fixed(Attention):
    def forward(self, x):
        q, k, v = (m(x).unflatten(-1, (4, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))
        return self.o((q @ k.mT).softmax(-1).matmul(v).transpose(1, 2).flatten(2))


class FromElsewhere(Attention):
    def forward(self, x):
        q, k, v = (m(x).unflatten(-1, (self.config.num_heads, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))
        return self.o((q @ k.mT).softmax(-1).matmul(v).transpose(1, 2).flatten(2))


class Counting(Attention):
    def forward(self, x):
        return self.h, super().forward(x)


class Net(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.layers = nn.ModuleList(blocks)
        self.table, self.norm = nn.Embedding(8, 8), nn.LayerNorm(8)
        self.scale = nn.Parameter(torch.ones(8))


QKV = {f"layers.*.{name}": "colwise" for name in "qkv"} | {"layers.*.o": "rowwise"}
PAIR = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}


def _regions(made):
    return {step.path: step for step in made.steps if isinstance(step, EnterRegion)}


def test_where_regions_are_entered():
    """A block itself is not: its residual connection is inside of it."""
    made = plan(Net(Attention(head_dim=2), Mlp()), {**QKV, **PAIR})
    assert list(_regions(made)) == ["layers.1.up"]  # the only column linear enters by itself, and so does each of three
    inner = nn.Sequential(Attention(head_dim=2))
    made = plan(Net(inner), {key.replace("*.", "*.0."): word for key, word in QKV.items()})
    (entered,) = _regions(made).values()
    assert (entered.path, entered.members[0], entered.row) == ("layers.0.0", "layers.0.0.q", "layers.0.0.o")


def test_styles_of_torch():
    styles = {
        "layers.*.up": ColwiseParallel(),
        "layers.*.down": RowwiseParallel(),
        "table": RowwiseParallel(input_layouts=Replicate()),
    }
    assert str(plan(Net(Mlp()), styles)) == str(plan(Net(Mlp()), {**PAIR, "table": "embedding_rowwise"}))
    apart = {"layers.*.up": ColwiseParallel(output_layouts=Replicate())}
    apart["layers.*.down"] = RowwiseParallel(input_layouts=Replicate())
    options = {s.path: dict(s.options) for s in plan(Net(Mlp()), apart).steps if isinstance(s, Swap)}
    assert (options["layers.0.up"], options["layers.0.down"]) == ({"gather_output": True}, {"parallel_input": False})


def test_rules_and_heads_beside_words():
    blocks = Net(Attention(config=None), Mlp(torch.softmax))
    blocks.config = types.SimpleNamespace(heads=4)
    made = plan(blocks, {**QKV, "layers.0": Heads("heads"), "layers.1": region(col="up", row="down")})
    rows = [step.path for step in made.steps if isinstance(step, Swap) and step.target is RowLinear]
    assert sorted(rows) == ["layers.0.o", "layers.1.down"]


def test_words_outside_of_blocks_score_words():
    data = {"head": "colwise_rep", "model.layers.*.mlp.gate": "colwise_rep"}
    made = plan(build(), data, parallel_output=True)
    targets = {step.path: step.target.__name__ for step in made.steps if isinstance(step, Swap)}
    assert targets["head"] == "VocabHead"
    assert targets["model.layers.0.mlp.gate"] == "ColumnLinear"


FUSED = {"layers.*.qkv": "colwise", "layers.*.o": "rowwise"}
TWO = {"layers.*.a.up": "colwise", "layers.*.b.up": "colwise", "layers.*.a.down": "rowwise"}

WRONG = [
    (Mlp, {}, "it names no module"),
    (Mlp, {"layer.*.up": "colwise"}, "Net has no module 'layer.*.up'", "'layers.*.up'"),
    (Mlp, {"up": "colwise"}, "Net has no module 'up'", "'layers.*.up'"),
    (Mlp, {"nothing alike": "colwise"}, "Net has no module", "layers.*.down"),
    (Mlp, {"table": "embeding_rowwise"}, "it is no word", "'embedding_rowwise'"),
    (Mlp, {"table": 3}, "it is no word", "say one of colwise"),
    (Mlp, {"table": Stages()}, "it is no word", "say one of colwise"),
    (Mlp, {"scale": region(col="up", row="down")}, "it is no word", "say one of colwise"),
    (Mlp, {**PAIR, "layers.0.up": "replicate"}, "'layers.*.up': 'colwise' names it too", "keep one"),
    (Mlp, {"scale": "colwise"}, "it is a parameter, and no module", "by_heads"),
    (Mlp, {"norm": "colwise"}, "it is no linear", "replicate"),
    (Mlp, {"layers.*.down": "rowwise"}, "no 'colwise' linear leads to it", "rowwise_split_input"),
    (Mlp, {"layers.*.up": "colwise"}, "its output stays split", "colwise_gather_output"),
    (Mlp, {"norm": SequenceParallel()}, "'sequence_parallel' cannot be served", "enable_sequence_parallelism"),
    (Mlp, {"layers.*.up": ColwiseParallel(input_layouts=Shard(1))}, "it is no word", "say one of"),
    (Mlp, {"layers.*.up": ColwiseParallel(use_local_output=False)}, "it is no word", "say one of"),
    (Mlp, {"layers.0": PrepareModuleInput()}, "it is no word", "say one of"),
    (lambda: Mlp(lambda x: x.softmax(-1)), PAIR, "depends on features of other ranks, or on their number", "region"),
    (lambda: Mlp(lambda x: x - x.mean(-1, keepdim=True)), {"layers.*": "pairwise"}, "0 can be the last", "region"),
    (lambda: Mlp(lambda x: x.view(2, 3, 12)), PAIR, "cannot be tried with one tensor", "region"),
    (lambda: Mlp(nn.PReLU(12)), PAIR, "has act.weight of its own", "region"),
    (lambda: Mlp(nn.LayerNorm(12)), {"layers.*": "pairwise"}, "0 can be the last", "region"),
    (lambda: nn.Sequential(Mlp()), {"layers.*": "pairwise"}, "(none) 0 can be the last", "region"),
    (Leaking, PAIR, "depends on features of other ranks, or on their number", "region"),
    (Fixed, QKV, "depends on features of other ranks, or on their number", "region"),
    (lambda: Attention(head_dim=3), QKV, "its head_dim count no heads in the 8 features", "region"),
    (lambda: Attention(fused=True, head_dim=2), FUSED, "layers.0.qkv (24) are not each queries, keys or", "region"),
    (lambda: Attention(head_dim=2, num_heads_per_core=4), QKV, "what num_heads_per_core, which it reads, is", "region"),
    (lambda: Attention(head_dim=2, n_rep=2), QKV, "what n_rep, which it reads, is on one rank", "region"),
    (lambda: FromElsewhere(head_dim=2), QKV, "what num_heads, which it reads, is on one rank", "region"),
    (lambda: Counting(head_dim=2, h=4), QKV, "what h, which it reads, is on one rank", "per_rank"),
    (lambda: nn.ModuleDict({"a": Mlp(), "b": Mlp()}), TWO, "its output stays split", "colwise_gather_output"),
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong[2][:40])
def test_refusals(wrong):
    make, data, what, *todo = wrong
    found = problems(Net(make()), data)
    assert any(what in p.what and all(said in p.todo for said in todo) for p in found), found


def test_every_word_that_is_refused_says_what_to_do():
    words = (
        "sequence_parallel embedding_colwise mla_kv_a_proj packed_colwise packed_rowwise moe_tp_experts grouped_gemm"
    )
    words += (
        " moe_identity_expert ep_router ep_dispatch_experts all_reduce local_params local_colwise local_rowwise local"
    )
    for word in words.split():
        (problem,) = problems(Net(Mlp()), {"layers.0": word})
        assert f"{word!r} cannot be served" in problem.what
        assert problem.rule == f"'layers.0': {word!r}"
        assert problem.todo


def test_the_number_of_a_layer_is_no_number_of_heads():
    assert plan(Net(Counting(head_dim=2, h=3), Counting(head_dim=2, h=4)), QKV)


def test_linears_of_several_modules_and_other_heads():
    blocks = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.ModuleDict({"c": nn.Linear(8, 8)}), "o": nn.Linear(8, 8)})
    (problem, *_) = problems(Net(blocks), {"layers.*.a": "colwise", "layers.*.b.c": "colwise", "layers.*.o": "rowwise"})
    assert "layers.0, layers.0.b hold the linears that lead to layers.0.o" in problem.what
    (problem,) = problems(Net(Attention(head_dim=2), Attention(head_dim=4)), QKV)
    assert "it has 2 heads (2 of keys and values), others have not" in problem.what
    (problem,) = problems(Net(Attention(head_dim=2)), QKV, ranks=3)
    assert "4 query heads cannot be split over 3 ranks" in problem.what


def test_a_parameter_that_is_forgotten_inside_of_a_region():
    data = {key: value for key, value in TINY.items() if not key.endswith("_norm")}
    found = problems(build(), data)
    assert {p.rule for p in found} == {"(what no path names is replicated)"}
    assert all("its gradient would be this rank's summand" in p.what for p in found)


def test_what_is_no_policy():
    with pytest.raises(ConfigError, match="a mapping of paths to words, or 'infer'"):
        shardcore.shard(build(), tp=1, policy="colwise")
