"""Packs that are wrong on purpose, each in one way; the conformance kit has to catch every one of them."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import kit_net
import torch
import torch.distributed as dist
import torch.nn.functional as F
from kit_net import Decoder, Mlp, Net, NetPolicy, on_stream
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from shardcore.comm.collectives import gather_from_tp, reduce_from_tp
from shardcore.comm.reads import read_local
from shardcore.mesh import context_of
from shardcore.nn import ColumnLinear, RowLinear
from shardcore.nn.functional import local_linear
from shardcore.policy import ModulePolicyDescription, Policy, SubModuleReplacementDescription
from shardcore.rows import SwapRow
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


# --- numbers -------------------------------------------------------------------------------------------------------


class NormsNotSummed(NetPolicy):
    """H2, ColossalAI: the gradients of norms on local heads stay partial."""

    def attention(self) -> list[Any]:
        rows = super().attention()
        return [rows[0], norm("attention.q_norm", "attention.k_norm"), rows[2]]


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
        return reduce_from_tp(local_linear(input, self.weight) + bias, self._shard_context.group)


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
    return SwapRow(text="split", names=names, target=ColumnLinear, options=(("enters", False),))


class ReplicatedInside(NetPolicy):
    """A linear inside a region's module is replicated: its gradient, and what passes it, count tp times too often."""

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
            group = context_of(self).group
            out["attentions"] = tuple(gather_from_tp(w.detach(), group, 1, 4) for w in out["attentions"])
        return out


_Detached.__name__ = "Net"


# --- random numbers --------------------------------------------------------------------------------------------------


class _OwnMasks(nn.Dropout):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # as in torch
        with torch.random.fork_rng():
            torch.manual_seed(next(_COUNT) * 1000 + dist.get_rank())
            return F.dropout(input, self.p, self.training)


_COUNT = iter(range(10**9))


class DifferentMasks(Replaced):
    """H6, H40: every rank drops other elements of a replicated activation."""

    suffix = ".drop"

    def spoil(self, module: nn.Module) -> None:
        if isinstance(module, nn.Dropout):
            module.__class__ = _OwnMasks


class _SameMasks(nn.Dropout):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # as in torch
        with torch.random.fork_rng():
            torch.manual_seed(next(_COUNT))
            return F.dropout(input, self.p, self.training)


class SameMasks(Replaced):
    """H6: every rank drops the same elements of its part."""

    suffix = "attention.drop"

    def spoil(self, module: nn.Module) -> None:
        module.__class__ = _SameMasks


class _NoMasks(nn.Dropout):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # as in torch
        return input


class ForgottenDropout(Replaced):
    """A dropout is lost."""

    suffix = "mlp.drop"

    def spoil(self, module: nn.Module) -> None:
        module.__class__ = _NoMasks


class Drifting(NetPolicy):
    """H19: replicated gradients differ by rounding, so that parameters drift apart."""

    def postprocess(self) -> None:
        for name, parameter in self.model.named_parameters():
            if name == "decoder.norm.weight":
                parameter.register_post_accumulate_grad_hook(_round)


def _round(parameter: Tensor) -> None:
    parameter.grad._local_tensor.mul_(1 + 1e-12 * dist.get_rank())


class SamplesAlone(NetPolicy):
    """H40: every rank samples from its user's generator."""

    def new_model_class(self) -> Any:
        return _SamplesAlone


class _SamplesAlone(Net):
    def generate(self, input_ids: Tensor, **options: Any) -> Any:
        return super().generate(input_ids, **options)


_SamplesAlone.__name__ = "Net"


class NoCache(NetPolicy):
    """H18: generation runs without its cache."""

    def new_model_class(self) -> Any:
        return _NoCache


class _NoCache(Net):
    def generate(self, input_ids: Tensor, use_cache: bool = True, **options: Any) -> Any:
        out = on_stream(Net.generate)(self, input_ids, use_cache=False, **options)
        if hasattr(out, "past_key_values"):
            out.past_key_values = None
        return out


_NoCache.__name__ = "Net"


class WholeCache(NetPolicy):
    """H18: every rank caches all heads."""

    def new_model_class(self) -> Any:
        return _WholeCache


class _WholeCache(Net):
    def generate(self, input_ids: Tensor, **options: Any) -> Any:
        out = on_stream(Net.generate)(self, input_ids, **options)
        for layer in getattr(getattr(out, "past_key_values", None), "layers", ()):
            layer.keys = layer.keys.repeat(1, 2, 1, 1)
        return out


_WholeCache.__name__ = "Net"


# --- cost and checkpoints ---------------------------------------------------------------------------------------------


class TooManyCollectives(NetPolicy):
    """H1: every column linear gathers and enters for itself."""

    def mlp(self) -> list[Any]:
        gathered = [col(name, gather_output=True) for name in ("mlp.gate", "mlp.up")]
        return [*gathered, row("mlp.down", parallel_input=False)]


class LosesState(NetPolicy):
    """A state dict that says something else than the parameters."""

    def postprocess(self) -> None:
        self.model.register_state_dict_post_hook(_spoil_state)


def _spoil_state(model: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    state["decoder.norm.weight"] = state["decoder.norm.weight"] * 2


class DescribedWrongly(Policy):
    """A description in Shardformer's words that swaps row and column."""

    def module_policy(self) -> Any:
        rows = NetPolicy().module_policy()
        swapped = ModulePolicyDescription(
            sub_module_replacement=[
                SubModuleReplacementDescription(suffix="gate", target_module=RowLinear),
                SubModuleReplacementDescription(suffix="up", target_module=RowLinear),
                SubModuleReplacementDescription(suffix="down", target_module=ColumnLinear),
            ]
        )
        block = [r for r in rows["Block"] if "mlp" not in str(r)]
        return {**rows, "Block": block, "Mlp": swapped}

    checks = NetPolicy.checks
    stages = NetPolicy.stages


class FailsOnOneRank(NetPolicy):
    """A module that raises on one rank, and leaves the other waiting."""

    def postprocess(self) -> None:
        self.model.decoder.norm.register_forward_hook(_fail)


def _fail(*_: Any) -> None:
    if dist.get_rank() == 1:
        raise ZeroDivisionError("only here")


def restore() -> None:
    """Undo what was done to classes."""
    for cls in (Mlp, Decoder):
        if hasattr(cls, "_native"):
            cls.forward = cls._native
            del cls._native


# --- cases that cannot show mistakes, or claim too little -----------------------------------------------------------


def build_at_random(**options: Any) -> Net:
    model = kit_net.build(**options)
    with torch.no_grad():
        model.encode.weight.copy_(torch.randn(model.encode.weight.shape, generator=_OTHER))
    return model


_OTHER = torch.Generator()
_OTHER.seed()


class Forgetful(Net):
    """H18: it does not return the cache that it generates with."""

    def generate(self, *args: Any, return_dict_in_generate: bool = False, **kwargs: Any) -> Any:
        tokens = super().generate(*args, **kwargs)
        return SimpleNamespace(sequences=tokens) if return_dict_in_generate else tokens


def build_without_cache(**options: Any) -> Net:
    model = kit_net.build(**options)
    model.__class__ = Forgetful
    return model


def same_inputs(model: Any, seed: int) -> dict[str, Tensor]:
    return kit_net.inputs(model, 0)


def no_loss(out: Any) -> Tensor:
    return out["logits"]


def digest_cases() -> list[Any]:
    return [dataclasses.replace(kit_net.CASE, policy=OrderOfASet)]
