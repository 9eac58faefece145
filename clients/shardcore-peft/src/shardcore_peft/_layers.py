"""Giving the adapters of PEFT's layers their forms in a sharded model."""

from __future__ import annotations

from typing import Any

from peft.tuners.ia3.layer import IA3Layer
from peft.utils import ModulesToSaveWrapper
from torch import nn
from torch.distributed.tensor import DTensor

from shardcore.fsdp.phase import data_axes
from shardcore.fsdp.scalars import on_replicas
from shardcore.mesh.context import ShardContext
from shardcore.nn import HeadParameters, Replicated
from shardcore.nn.intact import AROUND
from shardcore.nn.layout import distribute
from shardcore.nn.loading import take_full_tensors
from shardcore_peft._around import Finishing
from shardcore_peft._checks import check_layer
from shardcore_peft._copies import Tied, place_copies
from shardcore_peft._forms import Form, Forms, forms_at, scales_at
from shardcore_peft._linears import AdapterDropout
from shardcore_peft._merging import Merging
from shardcore_peft._sites import own_children


def place(layer: nn.Module, context: ShardContext, where: str, tied: Tied, *, has_values: bool) -> None:
    """Give the adapters of ``layer`` that have none yet their forms; its base is sharded already.

    The parameters of new adapters are whole and plain, and the same on all ranks of ``tp``.

    Args:
        layer: the layer of PEFT.
        context: of the sharded model.
        where: its path.
        tied: see `place_copies`.
        has_values: see `place_copies`.

    Raises:
        NotSupportedError: no form is known.
    """
    check_layer(layer, where)
    if isinstance(layer, ModulesToSaveWrapper):
        place_copies(layer, context, where, tied, has_values=has_values)
        return
    base = layer._modules["base_layer"]
    assert base is not None
    if isinstance(layer, IA3Layer):
        _hold(layer.ia3_l, scales_at(base, where, of_input=layer.is_feedforward), context)
    else:
        forms = forms_at(base, where)
        _place_lora(layer, forms, context)
        if forms.finishes:
            Finishing.swap_class(layer, context)
    Merging.swap_class(layer, context)
    # What the check of the sharded model goes by: this module stands around that one, and computes alike on all ranks.
    layer.__dict__[AROUND] = base
    take_full_tensors(layer)


def keep_on_replicas(layer: nn.Module, context: ShardContext) -> None:
    """Let every replica hold what is new of the adapters of ``layer``, and average the gradients of that.

    For a model that FSDP2 was applied to before, which divides nothing that comes later. What is new has its form on
    ``tp`` already.
    """
    axes = data_axes(context)
    for child in own_children(layer).values():
        for module in child.modules():
            held = module._parameters
            new = [name for name, p in held.items() if p is not None and not _is_on(p, axes)]
            for name in new:
                held[name] = on_replicas(held[name], context, axes)  # type: ignore[arg-type]  # it is there
            if new and context.size == 1:
                Replicated.swap_class(module, context)
                take_full_tensors(module)


def _is_on(parameter: nn.Parameter, axes: tuple[str, ...]) -> bool:
    names = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else None
    return set(axes) <= set(names or ())


def is_new(parameter: nn.Parameter | None) -> bool:
    """Tell whether a parameter of an adapter has no form yet."""
    return parameter is not None and not isinstance(parameter, DTensor)


def _place_lora(layer: Any, forms: Forms, context: ShardContext) -> None:
    for name in layer.lora_A:
        first, second, dropout = layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
        if is_new(second.weight):
            forms.first.take(first, context)
            forms.second.take(second, context)
        if forms.shared and isinstance(dropout, nn.Dropout) and not isinstance(dropout, AdapterDropout):
            AdapterDropout.swap_class(dropout, context)
            dropout.__dict__["_shard_tokens"] = forms.tokens
    for held in (layer.lora_embedding_A, layer.lora_embedding_B):
        _hold(held, forms.first, context)
    for magnitude in layer.lora_magnitude_vector.values():
        if is_new(magnitude.weight):
            forms.magnitude.take(magnitude, context)


def _hold(held: nn.ParameterDict, form: Form, context: ShardContext) -> None:
    """Give the new parameters of a dict their form; they are read as local tensors while the model runs."""
    names = tuple(name for name, parameter in held._parameters.items() if is_new(parameter))
    if not names:
        return
    options = {**form.options, "names": names}
    for name, layout in form.mixin.layouts(held, context.size, **options).items():
        parameter = held._parameters[name]
        assert parameter is not None
        held._parameters[name] = distribute(parameter, layout, context)
    form.mixin.swap_class(held, context, **options)._take_sequence(form.tokens)
    if "_split" in held.__dict__:  # of a dict that had parameters already
        held.__dict__["_split"] |= frozenset(names) if form.mixin is HeadParameters else frozenset()
    take_full_tensors(held)
