"""What once went wrong silently, or hung, away from the beaten path: it is exact, or one clear error on every rank."""

import copy

import pytest
import torch
import torch.distributed as dist
from tiny import TinyPolicy, batch, build, randomize, shard, twins
from torch import nn

import shardcore
from shardcore import (
    AgreementError,
    ModelSharder,
    NotSupportedError,
    PlanError,
    Policy,
    ShardConfig,
    WrapError,
    compile_plan,
    get_rng_state,
    manual_seed,
    reduce_partial_gradients,
)
from shardcore.mesh.context import context_of
from shardcore.styles import attribute, col, norm, region, replicate, row
from shardcore_testing.parity import assert_same_gradients

CONFIG = ShardConfig(tensor_parallel_size=2)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))
        self.size = 8

    def forward(self, x):
        return self.b(self.a(x)) + self.d(self.c(x))


def _policy(*rows):
    class PairPolicy(Policy):
        def module_policy(self):
            return {"Pair": list(rows)}

    return PairPolicy


def _problems(model, policy):
    with pytest.raises(PlanError) as caught:
        compile_plan(policy, model, CONFIG)
    return str(caught.value)


def test_rows_that_enter_twice():
    first = region(enter="", col="a", row="b")
    assert "two regions would enter at" in _problems(Pair(), _policy(first, region(enter="", col="c", row="d")))


def test_columns_that_enter_inside_a_region():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.pair = Pair()

    class OuterPolicy(Policy):
        def module_policy(self):
            return {"Outer": [region(enter="pair", col="pair.a", row="pair.b"), col("pair.c"), row("pair.d")]}

    assert "would enter again what entered the region at pair" in _problems(Outer(), OuterPolicy)


class Packed(torch.Tensor):
    """A tensor that is made of others, as those of torchao are."""

    def __tensor_flatten__(self):
        return ["a"], None


def test_packed_tensors():
    model = build()
    model.head.register_buffer("scales", torch.ones(2).as_subclass(Packed))
    with pytest.raises(NotSupportedError, match=r"its tensor 'head\.scales' is a .*Packed, whose values are packed"):
        ModelSharder(model, TinyPolicy, CONFIG).compile()


def test_attributes_with_two_values():
    rows = [attribute("size", 1), attribute("size", 2), replicate("")]
    assert "would be set to 1 and to 2" in _problems(Pair(), _policy(*rows))


def test_linears_that_compute_something_else():
    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 3

    model = Pair()
    model.a = Scaled(8, 8)
    rows = [region(enter="", col="a", row="b"), replicate("c", "d")]
    assert "Scaled has a forward of its own" in _problems(model, _policy(*rows))
    model = Pair()
    model.a.forward = lambda x: x
    assert "has a forward of its own on the instance" in _problems(model, _policy(*rows))
    model = Pair()
    model.a.extra = nn.Parameter(torch.zeros(1))
    assert "further parameters (extra)" in _problems(model, _policy(*rows))


def test_gradient_hooks_that_would_be_lost():
    model = Pair()
    model.a.weight.register_hook(lambda grad: grad * 0)
    rows = [region(enter="", col="a", row="b"), replicate("c", "d")]
    assert "the parameter has gradient hooks" in _problems(model, _policy(*rows))


def test_one_rank():
    model = ModelSharder(build(), TinyPolicy, ShardConfig(tensor_parallel_size=1)).shard()
    manual_seed(model, 3)
    assert get_rng_state(model).keys() == {"cpu"}
    reduce_partial_gradients(model)


def test_shared_modules(pool):
    pool.run(shared_modules, world=2)


def shared_modules():
    reference = build()
    reference.model.layers[1].mlp = reference.model.layers[0].mlp
    reference.model.layers[1].norm1 = reference.model.layers[1].norm2 = reference.model.layers[0].norm1
    model = shard(copy.deepcopy(reference))
    for seed in range(2):
        ids = batch(seed)
        reference(ids, labels=ids).backward()
        model(ids, labels=ids).backward()
    assert_same_gradients(reference, model)
    reference = build()
    reference.model.layers[1] = reference.model.layers[0]
    model = shard(copy.deepcopy(reference))
    ids = batch()
    reference(ids, labels=ids).backward()
    model(ids, labels=ids).backward()
    assert_same_gradients(reference, model)


def test_backwards_that_stop_inside_a_region(pool):
    pool.run(partial_backwards, world=2)


def partial_backwards():
    reference, model = twins()
    ids = batch()
    captured = []
    gate = model.model.layers[0].mlp.gate
    handle = gate.register_forward_pre_hook(lambda module, args: captured.append(args[0]))
    loss = model(ids, labels=ids)
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(loss, captured[:1], retain_graph=True)
    loss.backward()
    reference(ids, labels=ids).backward()
    assert_same_gradients(reference, model)
    handle.remove()

    # A backward that fails half-way, and the same graph again.
    model.zero_grad()
    failing = [True]

    def fail_once(grad):
        if failing and failing.pop():
            raise ArithmeticError

    handle = model.model.layers[0].norm2.register_forward_hook(lambda m, a, out: out.register_hook(fail_once) and None)
    loss = model(ids, labels=ids)
    with pytest.raises(ArithmeticError):
        loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()
    assert_same_gradients(reference, model)
    handle.remove()


def test_plain_weights(pool):
    pool.run(refused_at_run_time, world=2)


def refused_at_run_time():
    reference, model = twins()
    model.load_state_dict(reference.state_dict(), assign=True)
    with pytest.raises(WrapError, match="without assign splits whole tensors"):
        model(batch())


def test_an_interrupt_leaves_the_stream_outside(pool):
    pool.run(interrupted, world=2)


def interrupted():
    _, model = twins(dropout=0.3)
    shardcore.manual_seed(model, 3)
    before = torch.get_rng_state()

    def interrupt(module, args):
        raise KeyboardInterrupt

    handle = model.model.layers[1].mlp.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(batch())
    handle.remove()
    assert torch.equal(torch.get_rng_state(), before)
    assert not context_of(model).random.in_use


def test_differences_between_ranks(pool):
    pool.run(differences, world=2, timeout=90)


def differences():
    rank = dist.get_rank()

    def refused(model, match, **options):
        with pytest.raises(AgreementError, match=match):
            ModelSharder(model, TinyPolicy, CONFIG, **options).shard()

    frozen = build()
    frozen.model.norm.weight.requires_grad_(rank == 0)
    refused(frozen, "requires_grad of model.norm.weight")
    permuted = build()
    order = torch.randperm(64, generator=torch.Generator().manual_seed(rank))
    permuted.register_buffer("order", torch.arange(64)[order])
    refused(permuted, "the values of order")
    refused(build().train(rank == 0), "the training mode")
    refused(build(), "the argument sync_from", sync_from=rank)
    with torch.device("cpu" if rank == 0 else "meta"):
        bare = build() if rank == 0 else type(build())(build().config).double()
    refused(bare, "meta")


def test_one_module_under_two_rows(pool):
    pool.run(aliases, world=2)


def aliases():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = self.two = nn.LayerNorm(8)
            self.pair = Pair()

        def forward(self, x):
            return self.two(self.pair(self.one(x)))

    class TwicePolicy(Policy):
        def module_policy(self):
            return {"Twice": [norm("one"), norm("two"), replicate("pair")]}

    reference = Twice().double()
    randomize(reference)
    model = shard(copy.deepcopy(reference), TwicePolicy)
    x = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    reference(x).square().sum().backward()
    model(x).square().sum().backward()
    assert model.one is model.two
    assert_same_gradients(reference, model)
