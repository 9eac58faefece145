"""What one rank's Python holds beside the model, such as hooks, changes nothing about what is sent."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fused_net import batch as inputs
from fused_net import make_context, make_net, shard_net
from needs import FUSED
from tiny import TinyPolicy, batch, twins
from torch import nn

from shardcore.styles import region, sequence
from shardcore_testing.parity import assert_same_gradients

# A module that is called with ids alone has no gradient of its input.
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing when gradients are computed with respect")


class SequencePolicy(TinyPolicy):
    """The policy of the small decoder, with its tokens split."""

    def module_policy(self) -> Any:
        rows = super().module_policy()
        return {**rows, "Decoder": [*rows["Decoder"], sequence(scatter="layers[0]", gather="norm")]}


class SeparatePolicy(SequencePolicy):
    """Column linears that enter by themselves."""

    def module_policy(self) -> Any:
        rows = super().module_policy()
        attention = region(
            col="attention.q_proj",
            kv=("attention.k_proj", "attention.v_proj"),
            row="attention.o_proj",
            unit="head",
        )
        mlp = region(col=("mlp.gate", "mlp.up"), row="mlp.down")
        return {**rows, "Block": [rows["Block"][0], attention, mlp, *rows["Block"][3:]]}


def _copies(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    copied = tuple(a.clone() if torch.is_tensor(a) else a for a in args)
    return copied, {name: a.clone() if torch.is_tensor(a) else a for name, a in kwargs.items()}


KINDS: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda m: m.register_forward_hook(lambda module, args, out: None),
    "forward pre": lambda m: m.register_forward_pre_hook(lambda module, args: None),
    "full backward": lambda m: m.register_full_backward_hook(lambda module, gins, gouts: None),
    "full backward pre": lambda m: m.register_full_backward_pre_hook(lambda module, gouts: None),
    "forward, with another tensor": lambda m: m.register_forward_hook(
        lambda module, args, out: out.clone() if torch.is_tensor(out) else None
    ),
    "forward pre, with other tensors": lambda m: m.register_forward_pre_hook(
        lambda module, args, kwargs: _copies(args, kwargs), with_kwargs=True
    ),
}
QUICK = {"forward pre", "full backward"}


def _train(model: nn.Module) -> None:
    model.zero_grad()
    model(batch(), labels=batch(1)).backward()


def _hooked(kind: str, kv_heads: int, tokens: bool, policy: Any = SequencePolicy) -> None:
    fields = {"enable_sequence_parallelism": tokens}
    reference, sharded = twins(policy, fields=fields, kv_heads=kv_heads, layers=1)
    _train(reference)
    for path, module in sharded.named_modules():
        if isinstance(module, nn.ModuleList):
            continue
        handle = KINDS[kind](module) if dist.get_rank() == 0 else None
        _train(sharded)
        if handle is not None:
            handle.remove()
        try:
            assert_same_gradients(reference, sharded)
        except AssertionError as error:
            raise AssertionError(f"with a hook at {path!r}") from error


@pytest.mark.nightly
@pytest.mark.parametrize("tokens", [False, True], ids=["tokens whole", "tokens split"])
@pytest.mark.parametrize("kv_heads", [2, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_on_one_rank(pool, kind, kv_heads, tokens):
    pool.run(_hooked, kind, kv_heads, tokens, world=2, timeout=120)


@pytest.mark.parametrize(
    "kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.nightly) for kind in KINDS]
)
def test_linears_that_enter_by_themselves(pool, kind):
    pool.run(_hooked, kind, 1, False, SeparatePolicy, world=2, timeout=120)


def _fused(kind: str, region: bool) -> None:
    native = make_net(3)
    sharded = shard_net(copy.deepcopy(native), make_context((2,)), region)
    native(inputs(0)).tanh().sum().backward()
    if dist.get_rank() == 0:
        KINDS[kind](sharded.qkv)
    sharded(inputs(0)).tanh().sum().backward()
    assert_same_gradients(native, sharded)


@FUSED
@pytest.mark.parametrize("region", [False, True], ids=["alone", "region"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_fused_linear(pool, kind, region):
    pool.run(_fused, kind, region, world=2, timeout=120)
