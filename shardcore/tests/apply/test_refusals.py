"""Input that must be refused: one error on every rank, and nothing changed."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from plain import ParallelMixer, PlainBlock, ShardformerStyle, assert_unchanged, kinds_of, plain
from tiny import TinyPolicy, batch, build
from torch import nn

import shardcore
from shardcore.errors import (
    AgreementError,
    ConfigError,
    NoPolicyError,
    PlanError,
)
from shardcore.styles import attribute
from shardcore_shardformer import SubModuleReplacementDescription
from shardcore_testing.parity import assert_close


def _refused(kind, match, *, model=None, **arguments):
    """Shard and expect an error of this kind on this rank, with nothing changed; then shard for real."""
    model = build() if model is None else model
    kinds, values = kinds_of(model), copy.deepcopy(model.state_dict())
    with pytest.raises(kind, match=match) as caught:
        shardcore.shard(model, **{"policy": TinyPolicy, **arguments})
    assert type(caught.value) is kind
    assert_unchanged(model, kinds, values)
    return str(caught.value)


class Elsewhere(TinyPolicy):
    """Another plan on rank 1."""

    def module_policy(self):
        rows = super().module_policy()
        extra = [attribute("attention.head_dim", 5)] if dist.get_rank() == 1 else []
        return {**rows, "Block": [*rows["Block"], *extra]}


class FailsOnOne(TinyPolicy):
    def module_policy(self):
        if dist.get_rank() == 1:
            raise LookupError("no such file")
        return super().module_policy()


class CannotBeMade(TinyPolicy):
    def __init__(self):
        super().__init__()
        if dist.get_rank() == 1:
            raise LookupError("no such file")


class BadMixer(ParallelMixer):
    """Cannot be made on rank 1; on all ranks one of its parameters is not a part of the native one."""

    @staticmethod
    def from_native_module(module, process_group, **kwargs):
        if kwargs.get("fail") and dist.get_rank() == 1:
            raise ArithmeticError("in the user's class")
        new = ParallelMixer.from_native_module(module, process_group, **kwargs)
        if not kwargs.get("fail"):
            new.scale = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        return new


class BadMixerPolicy(ShardformerStyle):
    options = {"fail": True}  # noqa: RUF012

    def module_policy(self):
        policy = super().module_policy()
        policy[PlainBlock].sub_module_replacement[3] = SubModuleReplacementDescription("mixer", BadMixer, self.options)
        return policy


class BadShapePolicy(BadMixerPolicy):
    options = {}  # noqa: RUF012


def refusals():
    rank, world = dist.get_rank(), dist.get_world_size()
    start = "tensor_parallel_size 3 times data_parallel_size 1 is 3, but there are 4 ranks; start 3 ranks"
    assert _refused(ConfigError, "there are 4 ranks", tp=3).startswith(start)
    assert "use a tensor_parallel_size of 1, 2" in _refused(PlanError, "2 query heads", model=build(heads=2), tp=4)
    _refused(NoPolicyError, "TinyLM", policy=None, tp=world)

    different = build()
    with torch.no_grad():
        different.model.layers[1].mlp.up.bias[3] += rank == 2
    text = _refused(AgreementError, "ranks 0 and 2 differ in the values", model=different, tp=world)
    assert "the values of model.layers.1.mlp.up.bias: " in text
    assert "pass sync_from=0 to take the weights of rank 0" in text
    moved = build()
    moved.register_buffer("steps", torch.tensor(rank))
    _refused(AgreementError, "differ in the values of steps", model=moved, tp=world)
    _refused(AgreementError, "differ in step", policy=Elsewhere, tp=world)
    text = _refused(
        AgreementError,
        "differ in ShardConfig.partial_gradients",
        tp=world,
        partial_gradients="deferred" if rank else "in_backward",
    )
    assert "Start every rank from the same environment" in text
    other = build(layers=2 + rank % 2)
    _refused(AgreementError, "ranks 0 and 1 differ", model=other, tp=world)

    for arguments in ({"policy": FailsOnOne}, {"policy": CannotBeMade}):
        if rank == 1:
            _refused(
                PlanError if arguments["policy"] is FailsOnOne else ConfigError,
                "LookupError: .*no such file",
                tp=world,
                **arguments,
            )
        else:
            text = _refused(AgreementError, "rank 1 failed, so no rank was changed", tp=world, **arguments)
            assert "no such file" in text
            assert "\nrank 0 did not fail; " in text
    for wrong in ({"policy": object()}, {"policy": TinyPolicy, "nonsense": 3}, {"config": 7}):
        arguments = wrong if rank == 1 else {"policy": TinyPolicy}
        if rank == 1:
            _refused(ConfigError, "got object|nonsense|wanted a ShardConfig, got 7", tp=world, **arguments)
        else:
            _refused(AgreementError, "rank 1 failed, so no rank was changed. Its error: ConfigError", tp=world)

    model = plain()
    kind = ArithmeticError if rank == 1 else AgreementError
    _refused(kind, "in the user's class", model=model, policy=BadMixerPolicy, tp=world)
    text = _refused(ConfigError, "BadMixer", model=model, policy=BadShapePolicy, tp=world)
    assert text == (
        "BadMixer.from_native_module at blocks.0.mixer: its parameter 'scale' of ParallelMixer has shape (3,), neither "
        f"the full shape (8,) nor rank {rank}'s part of it along one dim (as torch.chunk cuts it)"
    )
    shardcore.shard(model, policy=ShardformerStyle, tp=world)
    assert_close(plain()(batch(vocab=13)), model(batch(vocab=13)), "after all refusals")


def test_bad_input_is_one_error_on_every_rank_and_changes_nothing(pool):
    pool.run(refusals, world=4, timeout=100)
