"""Packs that are wrong on purpose, each in one way; the conformance kit has to catch every one of them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import kit_net
import torch
import torch.distributed as dist
from kit_net import Decoder, Mlp, Net, NetPolicy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from shardcore.comm.collectives import gather_from_tp, reduce_from_tp
from shardcore.comm.dtensor_params import read_local
from shardcore.mesh import context_of
from shardcore.nn import ColumnLinear, RowLinear
from shardcore.nn.linear.functional import local_linear
from shardcore.policy import Stages
from shardcore.styles import (
    attribute,
    col,
    head,
    local_groups,
    norm,
    partial,
    region,
    replicate,
    row,
    vocab,
)
from shardcore.styles.layers import SwapRule


class Replaced(NetPolicy):
    """Lets a policy replace modules of the finished model by class."""

    suffix = ""

    def postprocess(self) -> None:
        for name, module in list(self.model.named_modules()):
            if name.endswith(self.suffix):
                self.spoil(module)

    def spoil(self, module: nn.Module) -> None:
        raise NotImplementedError


# --- numbers -------------------------------------------------------------------------------------------------------


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
        cross = region(enter="cross", arg="x", col=("cross.q", "cross.k"), row="cross.out")
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
    """The region says that the memory arrives, and nothing lets it in."""

    def memory(self) -> list[Any]:
        return []


class NoEnter(NetPolicy):
    """The columns of a region are split, and no gradient of its input is summed."""

    def mlp(self) -> list[Any]:
        return [_split("mlp.gate", "mlp.up"), row("mlp.down")]


def _split(*names: str) -> Any:
    return SwapRule(text="split", names=names, target=ColumnLinear, options=(("enters", False),))


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


# --- parameters ----------------------------------------------------------------------------------------------------


class PlainNorm(NetPolicy):
    """H8: one plain parameter among DTensors."""

    def postprocess(self) -> None:
        old = self.model.decoder.norm.weight
        self.model.decoder.norm._parameters["weight"] = nn.Parameter(old.to_local().detach().clone())


class CountedTwice(NetPolicy):
    """H8: replicated parameters are declared as split ones, so that clipping counts them on every rank."""

    def postprocess(self) -> None:
        for name, parameter in self.model.named_parameters():
            if "norm1" in name:
                parameter.register_post_accumulate_grad_hook(_call_it_split)


def _call_it_split(parameter: Tensor) -> None:
    grad = parameter.grad
    if grad.placements == (Replicate(),):
        # The norm of a partial gradient is the norm of its sum: here that of twice the gradient.
        parameter.grad = DTensor.from_local(grad.to_local(), grad.device_mesh, (Partial(),))


class TiesCome(NetPolicy):
    """H15: tied weights come apart."""

    def postprocess(self) -> None:
        self.model.head._parameters["weight"] = nn.Parameter(self.model.embed.weight.detach().clone())


class Unlisted(NetPolicy):
    """H42: a parameter is no longer listed; the model computes the same."""

    def postprocess(self) -> None:
        module = self.model.decoder.norm
        plain = module._parameters.pop("bias").to_local().detach()
        module.bias = None
        module.register_forward_hook(functools.partial(_add, plain))


def _add(bias: Tensor, module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out + bias


class PaddedVocabulary(NetPolicy):
    """H10: the vocabulary is padded, and the padding stays."""

    def preprocess(self) -> None:
        old = self.model.embed.weight.detach()
        padded = nn.Parameter(torch.cat([old, torch.zeros(3, old.size(1), dtype=old.dtype)]))
        self.model.embed.weight = self.model.head.weight = padded
        self.model.embed.num_embeddings = self.model.head.out_features = padded.size(0)


class NothingSplit(NetPolicy):
    """Everything is replicated: all numbers are right, and nothing is gained."""

    def module_policy(self) -> Any:
        return {"Net": [replicate("embed", "head", "encode", "decoder")]}


class OnlyTheVocabulary(NetPolicy):
    """The vocabulary is split, and every block is replicated."""

    def module_policy(self) -> Any:
        return {"Net": [vocab("embed"), head("head"), replicate("encode", "decoder")]}


class OneLinearWhole(NetPolicy):
    """A linear of every block is replicated, for no reason."""

    def module_policy(self) -> Any:
        rows = super().module_policy()
        block = [r for r in rows["Block"] if "cross" not in str(r)]
        return {**rows, "Decoder": [norm("norm")], "Block": [*block, replicate("cross")]}


# --- the plan ------------------------------------------------------------------------------------------------------


class MissingAttribute(NetPolicy):
    """H13: an attribute that does not exist."""

    def attention(self) -> list[Any]:
        return [*super().attention(), attribute("attention.num_key_value_groups", local_groups)]


class Misspelled(NetPolicy):
    """H14: a row that matches nothing."""

    def mlp(self) -> list[Any]:
        return [region(enter="mlp", col=("mlp.gate_proj", "mlp.up"), row="mlp.down")]


class MisspelledOptional(NetPolicy):
    """H14: a row that matches nothing and says that it may: its parameters are left out."""

    def mlp(self) -> list[Any]:
        return [region(enter="mlp", col=("mlp.gate_proj", "mlp.up"), row="mlp.down", optional=True)]


_NORMS = {"norm1", "norm2", "norm3"}


class OrderOfASet(NetPolicy):
    """H28: the order of a set decides the order of the plan."""

    def module_policy(self) -> Any:
        rows = super().module_policy()
        norms = [norm(name) for name in _NORMS]
        return {**rows, "Block": [*norms, *rows["Block"][1:]]}


class NoSizeCheck(NetPolicy):
    """Sizes that cannot be split are not refused."""

    checks = ()

    def module_policy(self) -> Any:
        return {"Net": [replicate("embed", "head", "encode", "decoder")]}


# --- what is left alone ---------------------------------------------------------------------------------------------


class PatchesTheClass(NetPolicy):
    """H27: a method of the native class is replaced."""

    def postprocess(self) -> None:
        if not hasattr(Mlp, "_native"):
            Mlp._native = Mlp.forward
            Mlp.forward = _patched_mlp


def _patched_mlp(self: Any, x: Tensor) -> Tensor:
    return self._native(x) + 0.0


class ChangesTheClassesOutput(PatchesTheClass):
    """H27: and other models of the class compute something else."""

    def postprocess(self) -> None:
        if not hasattr(Decoder, "_native"):
            Decoder._native = Decoder.forward
            Decoder.forward = _patched_decoder


def _patched_decoder(self: Any, x: Tensor, memory: Tensor, past: Any = None) -> Any:
    out = self._native(x, memory, past)
    return out if context_of(self) or hasattr(self, "_shard_context") else (out[0] * 1.5, *out[1:])


class OtherSignature(NetPolicy):
    """The model's forward takes other arguments."""

    def new_model_class(self) -> Any:
        return _Narrow


class _Narrow(Net):
    def forward(self, **inputs: Any) -> Any:
        return super().forward(**inputs)


_Narrow.__name__ = "Net"


class NoCheckpointing(NetPolicy):
    """H16: gradient checkpointing is switched off."""

    def postprocess(self) -> None:
        self.model.decoder.__class__ = type("Decoder", (_Deaf, type(self.model.decoder)), {})


class _Deaf:
    checkpointing = property(lambda self: None, lambda self, value: None)


class LocalAttentions(NetPolicy):
    """H17: captured attention weights are those of one rank."""

    def captured(self) -> list[Any]:
        return []


class LocalGradientOfAttentions(NetPolicy):
    """H17: captured attention weights are whole, and pass no gradient."""

    def captured(self) -> list[Any]:
        return []

    def new_model_class(self) -> Any:
        return _Detached


class _Detached(Net):
    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
        past: Any = None,
        memory: Tensor | None = None,
    ) -> Any:
        out = super().forward(input_ids, labels, output_attentions, output_hidden_states, past, memory)
        if "attentions" in out:
            channel = context_of(self).channel
            out["attentions"] = tuple(gather_from_tp(w.detach(), channel, 1, 4) for w in out["attentions"])
        return out


_Detached.__name__ = "Net"


def restore() -> None:
    """Undo what was done to classes."""
    for cls in (Mlp, Decoder):
        if hasattr(cls, "_native"):
            cls.forward = cls._native
            del cls._native


def digest_cases() -> list[Any]:
    return [dataclasses.replace(kit_net.CASE, policy=OrderOfASet)]


class NoStages(NetPolicy):
    """Nothing says where the model can be cut."""

    stages = None


class TiedHeadNotNamed(NetPolicy):
    """The weight is held as the embedding's, so that the plan has nothing against it; the head itself is nowhere."""

    stages = Stages(first=("embed", "encode", "positions"), blocks="decoder.layers", last="decoder.norm")
