"""What a backward computes while something is sent."""

from __future__ import annotations

import copy

import pytest
import torch
from llama_cases import batch, build, loss_of, shard
from torch.utils._python_dispatch import TorchDispatchMode

from shard_llama.policy import LlamaPolicy
from shardcore.comm import collectives
from shardcore.compile import compile_plan
from shardcore.config import ShardConfig
from shardcore.errors import PlanError
from shardcore.transfer import products
from shardcore_testing.parity import assert_close, assert_same_gradients

PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_}


class Order(TorchDispatchMode):
    """Notes products, and when a collective starts and ends that something may run beside."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.seen, self.names = [], []
        made = iter("abcdefghijklmnopqrstuvwxyz")

        seen, names = self.seen, self.names

        class Pending(collectives.Pending):
            def __init__(self, *args):
                super().__init__(*args)
                self.name = next(made)
                names.append(self.name)
                seen.append(f"start {self.name}")

            def wait(self):
                seen.append(f"wait {self.name}")
                return super().wait()

        monkeypatch.setattr(collectives, "Pending", Pending)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in PRODUCTS:
            self.seen.append("product")
        return func(*args, **(kwargs or {}))


def _products_beside(fields):
    model = shard(build("LlamaModel", num_hidden_layers=1), tp=2, **fields)
    loss = loss_of(model(**batch(model, length=8)))
    with pytest.MonkeyPatch.context() as patch, Order(patch) as order:
        loss.backward()
    spans = [(order.seen.index(f"start {name}"), order.seen.index(f"wait {name}")) for name in order.names]
    return [order.seen[start:end].count("product") for start, end in spans]


@pytest.mark.parametrize(
    ("fields", "products"),
    [
        # Weight gradients of gate and up beside the sum of their input's gradient, then of queries, keys and values.
        ({}, [2, 3]),
        # The gather at an exit has nothing beside it, nor has that behind the embedding.
        ({"enable_sequence_parallelism": True}, [0, 2, 0, 3, 0]),
        # What entered is gathered again beside the gradients of it.
        ({"enable_sequence_parallelism": True, "sequence_keep_gathered": False}, [0, 2, 2, 0, 3, 3, 0]),
    ],
    ids=["whole", "divided", "gathered again"],
)
def test_products_run_while_something_is_sent(pool, fields, products):
    assert pool.run(_products_beside, fields, world=2) == [products] * 2


def _in_pieces(dtype, bias):
    """Loss and gradients of a model whose tokens travel in pieces, and of one that waits for all of them."""
    native = build(num_hidden_layers=2, dtype=dtype, attention_bias=bias, mlp_bias=bias)
    for fields in ({}, {"sequence_keep_gathered": False}):
        plain, cut = (
            shard(copy.deepcopy(native), tp=2, enable_sequence_parallelism=True, enable_sequence_overlap=on, **fields)
            for on in (False, True)
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(products, "_ROWS", 8)
            for length in (32, 64):  # a row is multiplied alike beside 15 others, and more
                losses = [model(**batch(native, rows=2, length=length, pads=(0,))).loss for model in (plain, cut)]
                for loss in losses:
                    loss.backward()
                assert torch.equal(*losses), length
        for (name, wanted), got in zip(plain.named_parameters(), cut.parameters(), strict=True):
            assert torch.equal(wanted.grad.to_local(), got.grad.to_local()), name
    reference = copy.deepcopy(native)
    for model in (reference, cut):
        model.zero_grad()
        model(**batch(native, length=9)).loss.backward()
    assert_same_gradients(reference, cut, 1e-12 if dtype is torch.float64 else 1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_pieces_change_no_bit(pool, dtype, bias):
    pool.run(_in_pieces, dtype, bias, world=2)


def _changed():
    """A change in place of what came out of the gather; where nothing is gathered torch refuses it."""
    for overlap in (False, True):
        reference = build(num_hidden_layers=1)
        fields = {"enable_sequence_parallelism": True, "enable_sequence_overlap": overlap}
        sharded = shard(copy.deepcopy(reference), tp=2, **fields)
        for model in (reference, sharded):
            model.model.layers[0].self_attn.q_proj.register_forward_pre_hook(lambda _, args: (args[0].mul_(2),))
        losses = [model(**batch(reference)).loss for model in (reference, sharded)]
        for loss in losses:
            loss.backward()
        assert_close(*losses, "loss")
        assert_same_gradients(reference, sharded)


def test_what_entered_may_be_changed(pool):
    pool.run(_changed, world=2)


class Clock(TorchDispatchMode):
    """Time as it would pass where products take theirs, all else none, and one transfer at a time has the link.

    Attributes:
        now: in the time of a multiplication.
        of_a_number: how long one number, of those that a rank is given, is under way.
    """

    def __init__(self, patch, of_a_number, waits_at_once):
        super().__init__()
        self.now = self.free = 0.0
        self.seen = 0.0  # the time of all transfers
        clock = self

        class Pending(collectives.Pending):
            def __init__(self, work, result, read):
                super().__init__(work, result, read)
                # Of what is gathered, a rank is given what the others have; of what is scattered, as much.
                took = of_a_number * read.numel() / (2 if read.shape[0] == 2 else 1)
                clock.seen += took
                clock.free = self.end = max(clock.now, clock.free) + took
                if waits_at_once:
                    clock.now = self.end

            def wait(self):
                clock.now = max(clock.now, self.end)
                return super().wait()

        patch.setattr(collectives, "Pending", Pending)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in PRODUCTS:
            rows, columns = args[-2:]
            self.now += rows.shape[0] * rows.shape[1] * columns.shape[1]
        return out


def _time_of_a_step(overlap, of_a_number, *, waits_at_once=False):
    model = build("LlamaModel", num_hidden_layers=2, hidden_size=32, intermediate_size=96)
    fields = {"enable_sequence_parallelism": True, "enable_sequence_overlap": overlap}
    model, states = shard(model, tp=2, **fields), torch.randn(1, 32, 32, dtype=torch.float64, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "_ROWS", 4)
        clock = Clock(patch, of_a_number, waits_at_once)
        with clock:
            model(inputs_embeds=states).last_hidden_state.sum().backward()
    return clock.now, clock.seen


def _slow_channel():
    alone, _ = _time_of_a_step(False, 0.0)
    _, numbers = _time_of_a_step(False, 1.0)
    slow = alone / numbers * 2 / 3  # a region has six products and four transfers: each takes as long as one
    waiting, plain, cut = (_time_of_a_step(*way, waits_at_once=at_once) for way, at_once in (
        ((False, slow), True), ((False, slow), False), ((True, slow), False)
    ))  # fmt: skip
    return waiting[0] / alone, cut[0] / waiting[0], cut[0] / plain[0]


def test_a_step_on_a_slow_channel(pool):
    for waiting, cut, of_plain in pool.run(_slow_channel, world=2):
        assert waiting == pytest.approx(5 / 3)
        assert cut < 0.73
        assert of_plain < 0.8  # the backward of columns hides its transfers without pieces


def test_what_the_plan_says():
    model, fields = build(num_hidden_layers=1), {"tensor_parallel_size": 2, "enable_sequence_parallelism": True}
    plan = compile_plan(LlamaPolicy, model, ShardConfig(**fields, enable_sequence_overlap=True))
    assert "enable_sequence_overlap: tokens travel in pieces beside products" in plan.render()
    with pytest.raises(PlanError, match="symmetric memory is that of CUDA devices, and this is cpu"):
        compile_plan(LlamaPolicy, model, ShardConfig(**fields, enable_sequence_overlap="symm_mem"))
