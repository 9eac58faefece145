"""The random stream of a sharded model (D10): which masks agree, which differ, and what survives."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from tiny import TinyPolicy, batch, build, direction, shard
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint

import shardcore
from shardcore.errors import ConfigError, NotSupportedError
from shardcore.mesh.context import context_of
from shardcore.mesh.random_stream import RandomStream

P = 0.5
INSIDE = ("attention.drop", "mlp.drop")  # on heads and columns that are split


def _seed_user():
    torch.manual_seed(100 + 7 * dist.get_rank())


def _sharded(**options):
    model = shard(build(dropout=P, kv_heads=8, **options))
    _seed_user()
    return model


def _loss(model, seed=0):
    ids = batch(seed)
    return model(ids, labels=ids.roll(1, 1))


class Masks:
    """Records which elements every dropout dropped, by name of the module."""

    def __init__(self, model):
        self.seen = {}
        for name, module in model.named_modules():
            if isinstance(module, nn.Dropout):
                module.register_forward_hook(lambda _m, _a, out, name=name: self._record(name, out))

    def _record(self, name, out):
        self.seen.setdefault(name, []).append((out == 0).detach())

    def on_all_ranks(self):
        everything = [None] * dist.get_world_size()
        dist.all_gather_object(everything, self.seen)
        return everything


def _alike(a, b):
    return a.shape == b.shape and bool((a == b).all())


def masks():
    """H6 and H40, with different user seeds on the ranks."""
    model = _sharded()
    masks = Masks(model)
    for step in (0, 1):
        _loss(model, step).backward()
    ranks = masks.on_all_ranks()
    names = list(masks.seen)
    assert len(names) == 6
    for name in names:
        inside = name.endswith(INSIDE)
        for step in (0, 1):
            first, *others = (rank[name][step] for rank in ranks)
            assert 0.3 < first.double().mean() < 0.7
            assert all(_alike(first, other) != inside for other in others), f"{name}, step {step}"
    for own in ranks:
        flat = [(name, i, m) for name, found in own.items() for i, m in enumerate(found)]
        for i, (name, step, mask) in enumerate(flat):
            for other, at, theirs in flat[:i]:
                assert not _alike(mask, theirs), f"{name} step {step} and {other} step {at}"


def checkpointed():
    """Recomputation replays the masks: the same gradients as without."""
    model = _sharded()
    state = shardcore.get_rng_state(model)
    grads, after = {}, {}
    for kind in (None, "reentrant", "non-reentrant"):
        model.model.checkpoint = kind
        shardcore.set_rng_state(model, state)
        model.zero_grad()
        for seed in (0, 1):
            _loss(model, seed).backward()
        grads[kind] = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
        after[kind] = shardcore.get_rng_state(model)["cpu"]
    for kind in ("reentrant", "non-reentrant"):
        assert torch.equal(after[None], after[kind])
        for name, grad in grads[None].items():
            assert torch.equal(grad, grads[kind][name]), f"{kind} {name}"


def directional():
    """The only parity test that sees wrong masks: the slope along a random direction against <grad, v>."""
    for kind in (None, "non-reentrant"):
        model = shard(build(dropout=0.3, kv_heads=2, checkpoint=kind))
        _seed_user()
        epsilon = 1e-5
        ways = direction(model)
        shardcore.manual_seed(model, 5)
        _loss(model).backward()
        wanted = sum(float((p.grad * ways[n]).sum().full_tensor()) for n, p in model.named_parameters())
        values = []
        for sign in (1, -2):
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.add_(ways[name], alpha=sign * epsilon)
            shardcore.manual_seed(model, 5)
            values.append(float(_loss(model).detach()))
        slope = (values[0] - values[1]) / (2 * epsilon)
        assert abs(slope - wanted) <= 1e-6 * max(1.0, abs(wanted)), f"{kind}: {slope} and {wanted}"


def users_state():
    """A stream that was seeded by itself leaves the user's generator alone, and does not depend on it."""
    model = _sharded()
    shardcore.manual_seed(model, 11)
    before = torch.get_rng_state()
    first = _loss(model)
    first.backward()
    assert torch.equal(before, torch.get_rng_state())
    model.model(batch())  # a part of the model that is often called by itself
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(999)
    shardcore.manual_seed(model, 11)
    assert torch.equal(first, _loss(model))
    assert not torch.equal(first, _loss(model)), "the stream moves on"

    state = shardcore.get_rng_state(model)
    assert set(state) == {"cpu"}
    a = _loss(model)
    shardcore.set_rng_state(model, state)
    assert torch.equal(a, _loss(model))
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, shardcore.get_rng_state(model)["cpu"].sum().item())
    assert len(set(everywhere)) == 1

    clone = copy.deepcopy(model)
    assert torch.equal(_loss(clone), _loss(model)), "a copy continues where the model is"
    for _ in range(3):
        _loss(clone)
    state = shardcore.get_rng_state(model)
    _loss(clone)
    assert torch.equal(state["cpu"], shardcore.get_rng_state(model)["cpu"]), "with a stream of its own"

    before = shardcore.get_rng_state(model)["cpu"]
    model.eval()
    _loss(model)
    assert torch.equal(before, shardcore.get_rng_state(model)["cpu"]), "nothing is drawn in eval"


def exceptions():
    model = _sharded()

    def fail(*_):
        raise ArithmeticError

    attention = model.model.layers[1].attention
    for place in (attention.drop, attention.o_proj, model.model.layers[0].mlp.drop, model.head):
        users = torch.Generator()
        users.set_state(torch.get_rng_state())
        torch.randint(1 << 62, (), generator=users)  # of which the call's numbers are made
        handle = place.register_forward_hook(fail)
        with pytest.raises(ArithmeticError):
            _loss(model)
        handle.remove()
        assert torch.equal(users.get_state(), torch.get_rng_state()), "the user's state is back"
        masks = Masks(model)
        _loss(model).backward()
        ranks = masks.on_all_ranks()
        for name in masks.seen:
            assert _alike(ranks[0][name][-1], ranks[1][name][-1]) != name.endswith(INSIDE), name
        states = [None] * dist.get_world_size()
        dist.all_gather_object(states, shardcore.get_rng_state(model)["cpu"].tolist())
        assert states[0] == states[1], "the ranks' streams still agree"


def whole_model_checkpoint():
    model = _sharded()
    ids = batch()
    out = checkpoint(model, ids, use_reentrant=False)
    with pytest.raises(NotSupportedError) as caught:
        out.sum().backward()
    assert str(caught.value) == (
        "a checkpoint around the whole TinyLM recomputes it with other dropout masks: its random stream has moved on. "
        "Checkpoint its blocks instead (model.gradient_checkpointing_enable()), or set the dropout probabilities to 0."
    )
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    checkpoint(model, ids, use_reentrant=False).sum().backward()


def replicas():
    model = build(dropout=P, kv_heads=8)
    shardcore.shard(model, policy=TinyPolicy, tp=2, dp=2, wrap=False)
    _seed_user()
    masks = Masks(model)
    shardcore.manual_seed(model, 4)
    _loss(model)
    ranks = masks.on_all_ranks()
    assert context_of(model).replica == dist.get_rank() // 2
    for name in masks.seen:
        inside = name.endswith(INSIDE)
        a, b, c, d = (rank[name][0] for rank in ranks)
        assert (_alike(a, b), _alike(c, d)) == (not inside, not inside)
        assert not _alike(a, c), "each replica draws its own"


def many_steps():
    """H19: replicated parameters stay equal to the last bit."""
    model = shard(build(dropout=0.2, kv_heads=2))
    _seed_user()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    start = {n: p.detach().full_tensor().clone() for n, p in model.named_parameters()}
    for step in range(20):
        optimizer.zero_grad()
        _loss(model, step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    compared = 0
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        assert not torch.equal(start[name], parameter.full_tensor()), f"{name} was not trained"
        if parameter.placements == (Replicate(),):
            mine = parameter.to_local().detach()
            first = mine.clone()
            dist.broadcast(first, 0)
            assert torch.equal(mine, first), name
            compared += 1
    assert compared >= 18


def basics():
    masks()
    users_state()
    exceptions()


def test_masks_and_the_users_generator(pool):
    pool.run(basics, world=2)


def test_masks_on_four_ranks(pool):
    pool.run(masks, world=4)


def test_checkpointing_replays(pool):
    pool.run(checkpointed, world=2)


def test_directional_derivative(pool):
    pool.run(directional, world=2)
    pool.run(directional, world=4)


def test_checkpoint_around_the_model_is_refused(pool):
    pool.run(whole_model_checkpoint, world=2)


def test_data_parallel_replicas_draw_different_masks(pool):
    pool.run(replicas, world=4)


def test_replicated_parameters_stay_bit_equal(pool):
    pool.run(many_steps, world=2)


def test_regions_that_overlap_end_in_what_all_ranks_share():
    drawn = []
    for rank in range(2):
        stream = RandomStream(3, rank, torch.device("cpu"))
        stream.enter()
        for end in ("both", "one", "other"):  # LXMERT runs the MLPs of words and of images side by side
            stream.join(end) if end != "both" else (stream.fork("one"), stream.fork("other"))
            drawn.append(torch.rand(3))
        with stream.shared():
            drawn.append(torch.rand(3))
        stream.leave()
    alike = [torch.equal(one, two) for one, two in zip(drawn[:4], drawn[4:], strict=True)]
    assert alike == [False, True, True, True]


def test_seeding_a_model_that_was_not_sharded():
    model = nn.Linear(2, 2)
    for call in (
        lambda: shardcore.manual_seed(model, 0),
        lambda: shardcore.get_rng_state(model),
        lambda: shardcore.set_rng_state(model, {}),
    ):
        with pytest.raises(ConfigError, match=r"rng_state|manual_seed") as caught:
            call()
        assert "got a Linear that was not sharded; call shardcore.shard() first" in str(caught.value)


def foreign_state():
    model = _sharded()
    with pytest.raises(ConfigError, match=r"random state for \['cuda:0'\]; this model's stream has \['cpu'\]"):
        shardcore.set_rng_state(model, {"cuda:0": torch.zeros(8, dtype=torch.uint8)})


def test_state_for_other_devices(pool):
    pool.run(foreign_state, world=2)


def default_device():
    model = _sharded()
    torch.set_default_device("meta")
    try:
        assert model(torch.zeros(2, 4, dtype=torch.int64, device="cpu")).device.type == "cpu"
    finally:
        torch.set_default_device(None)


def test_another_default_device(pool):
    pool.run(default_device, world=2)


def through_wrappers():
    model = _sharded()
    wrapper = torch.compile(model)
    shardcore.manual_seed(wrapper, 3)
    state = shardcore.get_rng_state(wrapper)
    first = _loss(model).item()
    assert not torch.equal(state["cpu"], shardcore.get_rng_state(model)["cpu"])
    shardcore.set_rng_state(wrapper, state)
    assert _loss(model).item() == first
    deferred = shard(build(), partial_gradients="deferred")
    _loss(deferred).backward()
    norm = deferred.model.layers[0].attention.q_norm.weight
    assert "Partial" in str(norm.grad.placements)
    shardcore.reduce_partial_gradients(torch.compile(deferred))
    assert "Partial" not in str(norm.grad.placements)
    with pytest.raises(ConfigError, match="got a TinyLM that was not sharded"):
        shardcore.manual_seed(torch.compile(build()), 3)


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # importing torch's compiler
def test_wrappers_of_torch_are_looked_through(pool):
    pool.run(through_wrappers, world=2)
