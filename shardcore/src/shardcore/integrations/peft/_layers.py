"""Giving the adapters of PEFT's layers their forms in a sharded model."""

from __future__ import annotations

from peft.tuners.lora.layer import LoraLayer
from torch import nn
from torch.distributed.tensor import DTensor

from shardcore.integrations.peft._around import Finishing
from shardcore.integrations.peft._checks import check_layer
from shardcore.integrations.peft._forms import Forms, forms_at
from shardcore.integrations.peft._linears import AdapterDropout
from shardcore.mesh import ShardContext
from shardcore.nn import Replicated
from shardcore.nn.intact import AROUND
from shardcore.nn.layout import distribute
from shardcore.nn.loading import take_full_tensors

__all__ = ["is_new", "place"]


def place(layer: nn.Module, context: ShardContext, where: str) -> None:
    """Give the adapters of ``layer`` that have none yet their forms; its base is sharded already.

    The parameters of new adapters are whole and plain, and the same on all ranks of ``tp``.

    Raises:
        NotSupportedError: no form is known.
    """
    check_layer(layer, where)
    base = layer._modules["base_layer"]
    assert base is not None
    forms = forms_at(base, where)
    if isinstance(layer, LoraLayer):
        _place_lora(layer, forms, context)
    if forms.finishes and not isinstance(layer, Finishing):
        Finishing.swap_class(layer, context)
    # What the check of the sharded model goes by: this module stands around that one, and computes alike on all ranks.
    layer.__dict__[AROUND] = base
    take_full_tensors(layer)


def is_new(parameter: nn.Parameter | None) -> bool:
    """Tell whether a parameter of an adapter has no form yet."""
    return parameter is not None and not isinstance(parameter, DTensor)


def _place_lora(layer: LoraLayer, forms: Forms, context: ShardContext) -> None:
    for name in layer.lora_A:
        first, second, dropout = layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
        if is_new(second.weight):
            forms.first.take(first, context)
            forms.second.take(second, context)
        if forms.shared and isinstance(dropout, nn.Dropout) and not isinstance(dropout, AdapterDropout):
            AdapterDropout.swap_class(dropout, context)
            dropout.__dict__["_shard_tokens"] = forms.tokens
    for held in (layer.lora_embedding_A, layer.lora_embedding_B):
        _replicate(held, forms, context)


def _replicate(held: nn.ParameterDict, forms: Forms, context: ShardContext) -> None:
    """Let a dict of parameters have whole ones, which are read as local tensors while the model runs."""
    names = tuple(name for name, parameter in held._parameters.items() if is_new(parameter))
    if not names:
        return
    options = {**forms.first.options, "names": names}
    for name, layout in Replicated.layouts(held, context.size, **options).items():
        parameter = held._parameters[name]
        assert parameter is not None
        held._parameters[name] = distribute(parameter, layout, context)
    Replicated.swap_class(held, context, **options)._take_sequence(forms.first.tokens)
    take_full_tensors(held)
