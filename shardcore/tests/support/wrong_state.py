"""Packs that are wrong on purpose in what they do to parameters, classes and the model's interface."""

from __future__ import annotations

import functools
from typing import Any

import torch
from kit_net import Decoder, Mlp, Net, NetPolicy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from shardcore.comm.collectives import gather_from_tp
from shardcore.mesh.context import context_of


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
