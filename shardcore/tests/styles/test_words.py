"""The words for encoders, vision and speech: what enters once, fused projections, losses, refusals."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny import randomize, shard
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from shardcore.compile import compile_plan
from shardcore.config import ShardConfig
from shardcore.errors import NotSupportedError, PlanError
from shardcore.mesh.context import context_of
from shardcore.plan.steps.regions import EnterArgument, EnterRegion
from shardcore.policy import Policy, Stages
from shardcore.styles import (
    attribute,
    enter_arg,
    head,
    layer_drop,
    loss,
    norm,
    per_rank,
    refuse,
    region,
    replicate,
    segments,
    sequence,
    shared_rng,
    vocab,
    when_divisible,
)
from shardcore_testing.observing import Collectives
from shardcore_testing.parity import assert_close, assert_same_gradients

WIDTH = 16


class Attention(nn.Module):
    """Attention to states of another model; its projections lie head by head in one linear if ``fused``."""

    def __init__(self, heads=4, fused=False):
        super().__init__()
        self.heads, self.size = heads, WIDTH // heads
        self.fused = fused
        if fused:
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        else:
            self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, states=None):
        if self.fused:
            qkv = self.qkv(x).view(*x.shape[:-1], self.heads, 3 * self.size).transpose(1, 2)
            q, k, v = qkv.chunk(3, -1)
        else:
            states = x if states is None else states
            q, k, v = (
                p(t).view(*t.shape[:-1], self.heads, self.size).transpose(1, 2)
                for p, t in ((self.q, x), (self.k, states), (self.v, states))
            )
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Keep(nn.Module):
    """Drops whole samples, as stochastic depth does."""

    def forward(self, x):
        self.mask = torch.rand(x.size(0), 1, 1, dtype=x.dtype).round() if self.training else 1.0
        return x * self.mask


class Layer(nn.Module):
    def __init__(self, heads=4):
        super().__init__()
        self.itself, self.cross = Attention(heads, fused=True), Attention(heads)
        self.up, self.keep, self.down = nn.Linear(WIDTH, 24), Keep(), nn.Linear(24, WIDTH)
        self.drop = nn.Dropout(0.0)

    def forward(self, x, states):
        x = x + self.itself(x)
        x = x + self.cross(x, states)
        return x + self.down(self.drop(self.keep(self.up(x))))


class Decoder(nn.Module):
    def __init__(self, layers=2, heads=4):
        super().__init__()
        self.embed = nn.Embedding(13, WIDTH)
        self.layers = nn.ModuleList(Layer(heads) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids, states):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, states)
        return self.norm(x)


class Out(dict):
    """What transformers calls a ModelOutput, in short."""

    def __init__(self, loss=None, logits=None):
        super().__init__({k: v for k, v in (("loss", loss), ("logits", logits)) if v is not None})

    def to_tuple(self):
        return tuple(self.values())


class Model(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.decoder = Decoder(**options)
        self.head = nn.Linear(WIDTH, 13)

    def forward(self, ids, states, labels=None, return_dict=True):
        logits = self.head(self.decoder(ids, states))
        found = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        out = Out(found, logits)
        return out if return_dict else out.to_tuple()


def ours(model, logits, labels):
    """Twice the model's own loss, so that it can be told from it."""
    return 2 * F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class ModelPolicy(Policy):
    stages = Stages(first="embed", blocks="layers", last="norm").under("decoder", then="head")
    lets_in = True
    counts = "itself.heads"

    def module_policy(self):
        cross = ("cross.q", "cross.k", "cross.v")
        return {
            "Model": [head("head"), loss(ours)],
            "Decoder": [vocab("embed"), norm("norm"), *([enter_arg("", "states")] if self.lets_in else [])],
            "Layer": [
                region(enter="itself", col=segments("itself.qkv", 3, by="head"), row="itself.out", heads=self.counts),
                region(enter="cross", col=cross, row="cross.out", heads="cross.heads"),
                region(enter="up", col="up", row="down"),
                attribute("itself.heads", per_rank),
                attribute("cross.heads", per_rank),
                shared_rng("keep"),
            ],
        }


def _model(**options):
    model = Model(**options).to(torch.float64).eval()
    randomize(model)
    return model


def _batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 13, (2, 6), generator=generator)
    return ids, torch.randn(2, 5, WIDTH, generator=generator, dtype=torch.float64)


def _problems(policy, model=None, tp=2):
    with pytest.raises(PlanError) as caught:
        compile_plan(policy, model or _model(), ShardConfig(tensor_parallel_size=tp))
    return [str(problem) for problem in caught.value.problems]


def parity():
    reference = _model()
    sharded = shard(copy.deepcopy(reference), ModelPolicy)
    for seed in (0, 1):
        ids, states = _batch(seed)
        mine, other = states.clone().requires_grad_(), states.clone().requires_grad_()
        wanted, got = reference(ids, mine), sharded(ids, other)
        assert_close(wanted["logits"], got["logits"], "logits")
        wanted["logits"].square().sum().backward()
        got["logits"].square().sum().backward()
        assert_close(mine.grad, other.grad, "gradient of the states")
    assert_same_gradients(reference, sharded)
    weight = sharded.decoder.layers[0].itself.qkv.weight
    assert isinstance(weight, DTensor)
    assert weight.placements == (Shard(0),)
    assert torch.equal(weight.full_tensor(), reference.decoder.layers[0].itself.qkv.weight)


def entered_once(layers):
    sharded = shard(_model(layers=layers), ModelPolicy)
    ids, states = _batch()
    loss = sharded(ids, states.requires_grad_())["logits"].sum()
    with Collectives() as sent:
        loss.backward()
    return sent.counts["allreduce"]


def losses():
    reference = _model()
    sharded = shard(copy.deepcopy(reference), ModelPolicy)
    ids, states = _batch()
    wanted = reference(ids, states, labels=ids)
    for labels in ({"labels": ids}, {}):
        got = sharded(ids, states, **labels)
        assert ("loss" in got) == bool(labels)
        assert_close(wanted["logits"], got["logits"], "logits")
    assert_close(2 * wanted["loss"], sharded(ids, states, ids)["loss"], "loss, labels by position")
    assert_close(2 * wanted["loss"], sharded(ids, states, ids, False)[0], "loss of a tuple by position")
    assert type(sharded(ids, states, labels=ids, return_dict=None)) is Out
    first, second = sharded(ids, states, labels=ids, return_dict=False)
    assert_close(2 * wanted["loss"], first, "loss of a tuple")
    assert_close(wanted["logits"], second, "logits of a tuple")
    (2 * wanted["loss"]).backward()
    first.backward()
    assert_same_gradients(reference, sharded)


def same_samples():
    model = _model().train()
    for layer in model.decoder.layers:
        layer.drop.p = 0.5  # live, so that the region draws numbers of its own
    sharded = shard(model, ModelPolicy)
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        sharded(*_batch())
        for layer in sharded.decoder.layers:
            everybody = [torch.empty_like(layer.keep.mask) for _ in range(dist.get_world_size())]
            dist.all_gather(everybody, layer.keep.mask.contiguous())
            assert all(torch.equal(mask, everybody[0]) for mask in everybody)
    assert context_of(sharded) is not None


@pytest.mark.parametrize("world", [2, 4])
def test_parity(pool, world):
    pool.run(parity, world=world)


def test_states_enter_once(pool):
    one, two, three = (pool.run(entered_once, layers, world=2)[0] for layers in (1, 2, 3))
    assert two - one == three - two == 3  # self-attention, cross-attention, MLP: the states cost nothing in a block


def test_the_loss_is_put_in_after_the_forward(pool):
    pool.run(losses, world=2)


def test_whole_samples_are_dropped_alike(pool):
    pool.run(same_samples, world=2)


def test_plans_say_what_enters():
    plan = compile_plan(ModelPolicy, _model(), ShardConfig(tensor_parallel_size=2))
    assert EnterArgument(path="decoder", argument=("states", 1)) in plan.steps
    entry = next(s for s in plan.steps if isinstance(s, EnterRegion) and "cross.q" in s.members[0])
    assert "enters with 'x' for cross.q, cross.k, cross.v, leaves at cross.out" in entry.describe()
    for words in ("enters 'states' for all regions below", "loss of logits against labels after the forward"):
        assert words in plan.render()
    inference = compile_plan(ModelPolicy, _model(), ShardConfig(tensor_parallel_size=2, inference_only=True))
    assert not [s for s in inference.steps if isinstance(s, EnterArgument)]


def test_inference_on_split_tokens_lets_states_in():
    class OnSplitTokens(ModelPolicy):
        def module_policy(self):
            rows = super().module_policy()
            tokens = sequence(scatter="layers[0]", gather="norm")
            return {**rows, "Decoder": [*rows["Decoder"], tokens]}

    config = ShardConfig(tensor_parallel_size=2, inference_only=True, enable_sequence_parallelism=True)
    plan = compile_plan(OnSplitTokens, _model(), config)
    assert [s.path for s in plan.steps if isinstance(s, EnterArgument)] == ["decoder"]


def forgotten():
    class Forgotten(ModelPolicy):
        lets_in = False

    sharded = shard(_model(), Forgotten)
    ids, states = _batch()
    with pytest.raises(NotSupportedError, match="was called with a tensor that did not enter it"):
        sharded(ids, states.requires_grad_())


def test_states_that_nothing_lets_in(pool):
    pool.run(forgotten, world=2)


def test_heads_of_one_module():
    class Misnamed(ModelPolicy):
        counts = "itself.count"

    assert any("Attention has no number 'count'" in p for p in _problems(Misnamed))
    found = _problems(ModelPolicy, _model(heads=2), tp=4)
    assert any("2 heads (itself.heads) cannot be split over 4 ranks" in p for p in found)
    assert any("Attention.heads is 2, which 4 ranks do not divide" in p for p in found)


def test_segments_by_head_need_heads():
    class Headless(ModelPolicy):
        counts = None

    found = _problems(Headless)
    assert any("segments in the order of heads are cut between heads" in p for p in found)


class Staged(Policy):
    def module_policy(self):
        mlp = region(enter="up", col="up", row="down")
        cross = region(enter="cross", col=("cross.q", "cross.k", "cross.v"), row="cross.out", heads="cross.heads")
        return {
            "Layer": [
                when_divisible("cross.heads", cross, otherwise=replicate("cross")),
                replicate("itself"),
                mlp,
            ]
        }


def test_what_does_not_divide_is_replicated_if_the_policy_says_so():
    for heads, split in ((4, True), (2, False)):
        plan = compile_plan(Staged, Layer(heads), ShardConfig(tensor_parallel_size=4))
        (weight,) = [p for p in plan.parameters if p.name == "cross.q.weight"]
        assert ("split" in str(weight.layout)) == split


def test_a_variant_that_is_refused_is_one_problem():
    class Refusing(ModelPolicy):
        def module_policy(self):
            rows = super().module_policy()
            wide = refuse(lambda model: len(model.decoder.layers) > 1, "it has layers that cannot be split")
            return {"Model": [wide, *rows["Model"]]}

    (problem,) = _problems(Refusing)
    assert problem.startswith("(the model itself): it has layers that cannot be split\n")
    assert "next: build the model without it, or pass shard() a policy of your own" in problem


@pytest.mark.parametrize(
    ("value", "kind"), [(None, "NoneType"), (torch.ones(2), "Tensor"), (2.0, "float"), (True, "bool")]
)
def test_only_whole_numbers_are_divided(value, kind):
    class Odd(ModelPolicy):
        counts = "itself.count"  # a second problem, which has to be said as well

    model = _model()
    for layer in model.decoder.layers:
        layer.itself.heads = value
    found = _problems(Odd, model)
    assert any(f"Attention.heads is a {kind}; per_rank divides a whole number" in p for p in found)
    assert any("Attention has no number 'count'" in p for p in found)


def test_blocks_are_not_left_out_by_replicas():
    class Dropping(ModelPolicy):
        name = "layerdrop"

        def module_policy(self):
            rows = super().module_policy()
            return {**rows, "Decoder": [*rows["Decoder"], layer_drop(self.name)]}

    class Misnamed(Dropping):
        name = "layer_drop"

    for rate, dp, said in ((0.5, 1, False), (0.0, 2, False), (0.5, 2, True)):
        model = _model()
        model.decoder.layerdrop = rate
        config = ShardConfig(tensor_parallel_size=2, data_parallel_size=dp)
        if not said:
            compile_plan(Dropping, model, config)
            continue
        with pytest.raises(PlanError, match=r"Decoder.layerdrop is 0.5: every data-parallel replica would leave out"):
            compile_plan(Dropping, model, config)
        compile_plan(Dropping, model, dataclasses.replace(config, inference_only=True))
    assert any("Decoder has no number 'layer_drop'" in p for p in _problems(Misnamed))


def test_a_partly_absent_region_is_a_problem():
    class Partly(ModelPolicy):
        def module_policy(self):
            rows = super().module_policy()
            rows["Layer"][2] = region(enter="up", col="up", row="dwon", optional=True)
            return rows

    assert any("only a part of the region is there, without dwon" in problem for problem in _problems(Partly))
