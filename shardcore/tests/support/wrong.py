"""Packs that are wrong on purpose, each in one way: here, they compute other numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.distributed as dist
from kit_net import NetPolicy
from torch import Tensor, nn

from shardcore.comm.collectives import reduce_from_tp
from shardcore.comm.dtensor_params import read_local
from shardcore.nn import ColumnLinear, RowLinear
from shardcore.nn.linear.functional import local_linear
from shardcore.policy import Scope, Word
from shardcore.styles import (
    attribute,
    col,
    local_groups,
    norm,
    partial,
    region,
    replicate,
    row,
    vocab,
)


class Replaced(NetPolicy):
    """Lets a policy replace modules of the finished model by class."""

    suffix = ""

    def postprocess(self) -> None:
        for name, module in list(self.model.named_modules()):
            if name.endswith(self.suffix):
                self.spoil(module)

    def spoil(self, module: nn.Module) -> None:
        raise NotImplementedError


class NormsNotSummed(NetPolicy):
    """H2, ColossalAI: the gradients of norms on local heads stay partial."""

    def attention(self) -> list[Any]:
        rows = super().attention()
        names = ("attention.q_norm", "attention.k_norm")
        said = dataclasses.replace(rows[0], after=names)  # a lie, without which it is a problem of the plan
        return [said, norm(*names), rows[2]]


class NormsSummedInPlace(NormsNotSummed):
    """H2, transformers: they are summed in place after every backward, so that the first one counts again and again."""

    def postprocess(self) -> None:
        for name, parameter in self.model.named_parameters():
            if "_norm" in name:
                parameter.register_post_accumulate_grad_hook(_sum_in_place)


def _sum_in_place(parameter: Tensor) -> None:
    dist.all_reduce(parameter.grad._local_tensor)


class _BiasBeforeSum(RowLinear):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # as in torch
        if self.region is not None:
            self.region.leave()
        (bias,) = read_local(self.bias)
        return reduce_from_tp(local_linear(input, self.weight) + bias, self._shard_context.channel)


class BiasBeforeSum(Replaced):
    """H4: the bias of a row linear is added on every rank before the sum."""

    suffix = "mlp.down"

    def spoil(self, module: nn.Module) -> None:
        module.__class__ = type("RowLinear", (_BiasBeforeSum,), {})


class UnpatchedHeads(NetPolicy):
    """H12: fixed views with the whole number of heads, which fit by accident. The policy sets no local head count."""


class HeadLeftSplit(NetPolicy):
    """H37: the logits stay split."""

    def module_policy(self) -> Any:
        rows = super().module_policy()
        return {**rows, "Net": [vocab("embed"), col("head"), replicate("encode"), *self.captured()]}


class ResidualInside(NetPolicy):
    """The region's module contains the residual connection (ALBERT): forward exact, gradients wrong."""


class NotEntered(NetPolicy):
    """A further tensor arrives in a region without having entered it."""

    def module_policy(self) -> Any:
        rows = super().module_policy()
        block = [r for r in rows["Block"] if "cross" not in str(r)]
        cross = region(enter="cross.x", col=("cross.q", "cross.k"), row="cross.out")
        return {**rows, "Decoder": [norm("norm")], "Block": [*block, cross]}


class MemoryNotSummed(NetPolicy):
    """The same, by linears that enter nothing: the gradient of the tensor is this rank's summand."""

    def memory(self) -> list[Any]:
        return []

    def module_policy(self) -> Any:
        rows = super().module_policy()
        block = [r for r in rows["Block"] if "cross" not in str(r)]
        return {**rows, "Block": [*block, col("cross.q"), _split("cross.k"), row("cross.out")]}


class ForgottenEnterArg(NetPolicy):
    """The memory arrives in the region, and nothing lets it in."""

    def memory(self) -> list[Any]:
        return []


class NoEnter(NetPolicy):
    """The columns of a region are split, and no gradient of its input is summed."""

    def mlp(self) -> list[Any]:
        return [_split("mlp.gate", "mlp.up"), row("mlp.down")]


def _split(*names: str) -> Any:
    def plan(scope: Scope) -> None:
        for name in names:
            scope.swap(name, ColumnLinear, enters=False)

    return Word(text="split", planned=plan)


class ReplicatedInside(NetPolicy):
    """A linear inside a region's module is replicated, and its gradient not summed."""

    def mlp(self) -> list[Any]:
        return [region(enter="mlp", col="mlp.up", row="mlp.down"), replicate("mlp.gate")]


class SharedHeadsNotSummed(NetPolicy):
    """H25: KV heads that ranks share are replicated, and their gradients are not summed."""

    def attention(self) -> list[Any]:
        return [
            region(enter="attention", col="attention.q", row="attention.o", unit="head"),
            replicate("attention.k", "attention.v"),
            partial("attention.q_norm", "attention.k_norm"),
            attribute("attention.groups", local_groups),
        ]


class SaidToBeAfter(NetPolicy):
    """H25: the same, and the region says that they run after its row linear."""

    def attention(self) -> list[Any]:
        names = ("attention.k", "attention.v")
        return [
            region(enter="attention", col="attention.q", row="attention.o", unit="head", after=names),
            replicate(*names),
            partial("attention.q_norm", "attention.k_norm"),
            attribute("attention.groups", local_groups),
        ]


class FusedAsOne(NetPolicy):
    """H9: a fused linear is split as if it were one projection."""

    def mlp(self) -> list[Any]:
        return [region(enter="mlp", col="mlp.both", row="mlp.down")]
