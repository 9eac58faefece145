"""Tensors that arrive in regions by another way than the input of a block."""

from __future__ import annotations

import copy
import warnings
from collections import Counter

import pytest
import torch
import ways
from needs import TRACES
from planned import problems_of
from tiny import shard
from ways import Biased, Channels, Continuous, Direct, Handing, Latent, build

import shardcore
from shardcore.apply.sharder import ModelSharder
from shardcore.config import ShardConfig
from shardcore.errors import NotSupportedError, PlanError
from shardcore.styles import attribute, enter_arg, norm, per_rank, region, replicate, slice_arg
from shardcore_planner import collectives
from shardcore_testing.observing import Collectives, Draws
from shardcore_testing.parity import assert_close, assert_same_gradients

KINDS = {
    "biased": (Biased, ways.BiasedPolicy),
    "summing": (Biased, ways.SummingPolicy),
    "handing": (Handing, ways.HandingPolicy),
    "latent": (Latent, ways.LatentPolicy),
    "direct": (Direct, ways.DirectPolicy),
    "channels": (Channels, ways.ChannelsPolicy),
    "continuous": (Continuous, ways.ContinuousPolicy),
}


def exact(kind):
    """Loss and every gradient, with whole and split tokens and logits, twice, and recomputed."""
    native, policy = KINDS[kind]
    reference = build(native)
    ids = torch.randint(0, 13, (3, 7), generator=torch.Generator().manual_seed(1))
    for fields in ways.SETTINGS:
        reference.stack.reentrant = None
        sharded = shard(copy.deepcopy(reference), policy, **fields)
        with torch.no_grad():
            assert_close(reference(ids), sharded(ids), f"logits with {fields}")
        for reentrant in (None, False) if fields.get("enable_sequence_parallelism") else (None, False, True):
            for model in (reference, sharded):
                model.zero_grad()
                model.stack.reentrant = reentrant
            for batch in (ids, ids[:1].flip(1)):
                losses = [model(batch, labels=batch.roll(1, 1)) for model in (reference, sharded)]
                assert_close(*losses, f"loss with {fields}")
                for loss in losses:
                    loss.backward()
            try:
                assert_same_gradients(reference, sharded, tolerance=1e-12)
            except AssertionError as error:
                raise AssertionError(f"{fields}, reentrant={reentrant}: {error}") from None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [2, 4])
def test_exact(pool, world, kind):
    pool.run(exact, kind, world=world, timeout=120)


def alone(kind):
    """Each parameter trained, and all others frozen but the head: what needs no gradient enters without a node."""
    native, policy = KINDS[kind]
    reference = build(native)
    ids = torch.randint(0, 13, (2, 7), generator=torch.Generator().manual_seed(1))
    for fields in ways.SETTINGS[:2]:
        sharded = shard(copy.deepcopy(reference), policy, **fields)
        for name, _ in reference.named_parameters():
            for model in (reference, sharded):
                model.zero_grad()
                for other, parameter in model.named_parameters():
                    parameter.requires_grad_(other in (name, "head.weight"))
                model(ids, labels=ids).backward()
            assert_same_gradients(reference, sharded, tolerance=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_trained_alone(pool, kind):
    pool.run(alone, kind, world=2, timeout=120)


def _step(model, ids):
    with Collectives() as forward:
        loss = model(ids, labels=ids)
    with Collectives() as backward:
        loss.backward()
    return forward.count, backward.count


def sent(kind):
    """What the plan says is sent."""
    native, policy = KINDS[kind]
    ids = torch.randint(0, 13, (2, 7), generator=torch.Generator().manual_seed(1))
    found = []
    for fields in ways.SETTINGS:
        sharder = ModelSharder(build(native), policy, ShardConfig.of(**fields))
        model = sharder.shard()
        planned = Counter(c.phase for c in collectives(sharder.plan))
        assert _step(model, ids) == (planned["forward"], planned["backward"]), fields
        found.append((planned["forward"], planned["backward"]))
    return found


#: By kind, the collectives of two blocks in the forward and in the backward, beside those of embedding, head and loss.
SENT = {
    "summing": (2, 2 + 2),
    "handing": (2, 2),
    "latent": (2, 2 * 2 + 2 * 2),
    "direct": (2, 2 * 2 + 2),
    "channels": (4, 4),
    "continuous": (2, 2 + 2 * 2),
}


@pytest.mark.parametrize("kind", SENT)
def test_what_is_sent(pool, kind):
    gathered, _, whole = pool.run(sent, kind, world=2, timeout=120)[0]
    forward, backward = SENT[kind]
    assert whole == (forward + 1 + 2, backward + 1)
    assert gathered == (forward + 1 + 1, backward + 1)


def _policy(base, *block, stack=()):
    return type("Given", (base,), {"block": block, "stack": stack})


def _region(enter: str | tuple[str, ...] = "mixer", **options):
    return region(enter=enter, col=ways.QKV, row="mixer.out", unit="head", **options)


MISTAKES = [
    (
        ways.ChannelsPolicy,
        (region(enter="mixer", col=("mixer.into", "mixer.steps"), row=("mixer.rates", "mixer.out")),),
        "it has in_features 5, but mixer.out at the end of its region has 24; both read the same channels",
    ),
    (
        ways.ChannelsPolicy,
        (region(col=("mixer.into", "mixer.rates"), row=("mixer.steps", "mixer.out")),),
        "several row linears are for a region that is entered at",
    ),
    (ways.BiasedPolicy, (_region(), slice_arg("mixer", "slope", 0)), "Biased.forward has no argument 'slope'"),
    (ways.BiasedPolicy, (_region(), slice_arg("mixers", "slopes", 0)), "Block has no submodule 'mixers'"),
    (
        ways.BiasedPolicy,
        (_region(), slice_arg("mixer", "mask", 1, heads="mixer.count")),
        "Biased has no number 'count'",
    ),
    (
        ways.BiasedPolicy,
        (_region(), slice_arg("mixer", "mask", 1), slice_arg("mixer", "mask", 0)),
        "the argument 'mask' of stack.blocks.0.mixer would be cut twice",
    ),
    (ways.BiasedPolicy, (_region("mixer.out"),), "enter='mixer.out' is a part of the region behind its entry"),
    (ways.BiasedPolicy, (_region(("mixer", "")),), "enter= names 2 modules that hold its linears"),
    (ways.BiasedPolicy, (_region("mixer.y"),), "Biased (mixer) has no submodule 'y'"),
    (
        ways.LatentPolicy,
        (ways.LatentPolicy.block[0], replicate("mixer.q_a", "mixer.kv_a"), norm("mixer.q_norm", "mixer.kv_norm")),
        "it is inside the region that is entered at stack.blocks.0.mixer",
    ),
    (
        ways.ChannelsPolicy,
        (region(enter="mixer", col=("mixer.into", "mixer.rates"), row="mixer.out"), replicate("mixer.steps")),
        "it is inside the region that is entered at stack.blocks.0.mixer",
    ),
]


@pytest.mark.parametrize(("base", "block", "what"), MISTAKES)
def test_mistakes(base, block, what):
    kind = {ways.BiasedPolicy: Biased, ways.LatentPolicy: Latent, ways.ChannelsPolicy: Channels}
    assert any(what in problem for problem in problems_of(build(kind[base]), _policy(base, *block, stack=base.stack)))


def test_heads_that_do_not_divide():
    policy = _policy(
        ways.BiasedPolicy, _region(heads="mixer.heads"), slice_arg("mixer", "mask", 1, heads="mixer.heads")
    )
    assert any("cannot be split over 3 ranks" in p for p in problems_of(build(Biased), policy, tp=3))


def refused():
    """Gradients that nobody would sum, and tensors without heads."""
    ids = torch.randint(0, 13, (2, 7), generator=torch.Generator().manual_seed(1))
    slopes, heads = slice_arg("mixer", "slopes", 0), attribute("mixer.heads", per_rank)
    whole = (replicate("table", "scale"),)
    summing = (slice_arg("mixer", "bias", 0, partial=True), slice_arg("mixer", "mask", 1))
    mixer = _region("mixer.x")
    summand = "every rank holds stack.table.weight whole"
    cases = [
        ((mixer, slopes, *summing, heads), whole, summand),
        ((mixer, slopes, slice_arg("mixer", "bias", 1), heads), whole, "wanted 4 heads"),
        ((mixer, slopes, *summing, heads), (*whole, enter_arg("", "ids")), summand),
    ]
    for block, stack, message in cases:
        sharded = shard(build(Biased), _policy(ways.BiasedPolicy, *block, stack=stack))
        with pytest.raises((NotSupportedError, PlanError), match=message):
            sharded(ids)
    sharded = shard(build(Handing), ways.HandingPolicy)
    for block in sharded.stack.blocks:
        block.mixer.zeros = True
    sharded(ids).sum().backward()  # made by the rank: nobody else has a summand of its gradient


def test_refused(pool):
    pool.run(refused, world=2, timeout=120)


def random_numbers():
    """Dropout behind the entries of a latent attention: other masks on each rank, and the same elsewhere again."""
    sharded = shard(build(Latent), ways.LatentPolicy)
    for block in sharded.stack.blocks:
        block.mixer.drop.p = 0.5
    ids = torch.randint(0, 13, (2, 7), generator=torch.Generator().manual_seed(1))
    with Draws() as draws:
        sharded(ids).sum().backward()
    after = shardcore.get_rng_state(sharded)
    return [mask.tolist() for mask in draws.drawn], {name: state.tolist() for name, state in after.items()}


def test_random_numbers(pool):
    (first, state), (second, other) = pool.run(random_numbers, world=2, timeout=60)
    assert len(first) == len(second) == 2
    assert all(one != two for one, two in zip(first, second, strict=True))
    assert state == other


def for_inference():
    """A backward through a model that is planned without one is as right as ever."""
    for kind in ("latent", "biased", "channels"):
        native, policy = KINDS[kind]
        reference = build(native).eval()
        sharded = shard(copy.deepcopy(reference), policy, inference_only=True)
        sharded.requires_grad_(requires_grad=True)
        ids = torch.randint(0, 13, (2, 7), generator=torch.Generator().manual_seed(1))
        for model in (reference, sharded):
            model(ids).square().sum().backward()
        assert_same_gradients(reference, sharded)


def test_for_inference(pool):
    pool.run(for_inference, world=2, timeout=120)


def compiled():
    """In graphs, where no state in Python can tell what has entered."""
    for kind, (native, policy) in KINDS.items():
        reference = build(native)
        sharded = shard(copy.deepcopy(reference), policy)
        for block in sharded.stack.blocks:
            block.compile(backend="aot_eager")
        ids = torch.randint(0, 13, (2, 7), generator=torch.Generator().manual_seed(1))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of its own doings while it traces
            for model in (reference, sharded):
                model(ids, labels=ids).backward()
        try:
            assert_same_gradients(reference, sharded)
        except AssertionError as error:
            raise AssertionError(f"{kind}: {error}") from None


@pytest.mark.nightly
@TRACES
def test_compiled(pool):
    pool.run(compiled, world=2, timeout=240)
