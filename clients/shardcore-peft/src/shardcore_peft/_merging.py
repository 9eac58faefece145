"""Merging adapters into a base of which each rank has a part: on whole tensors, one layer at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardcore.comm.dtensor_params import is_packed, local_tensor
from shardcore.comm.parts import part_of
from shardcore.errors import NotSupportedError
from shardcore.fsdp.units import unit_of
from shardcore.mesh.context import ShardContext
from shardcore.nn import ParallelMixin
from shardcore_peft._sites import nested


class Merging(ParallelMixin):
    """A layer of PEFT that merges its adapters, and takes them out again; every rank calls it.

    PEFT sets ``weight.data``, which torch ignores for a DTensor without a word. So while it works the parameters of the
    layer are whole and plain, and each rank copies its part back.
    """

    keeps_name: ClassVar[bool] = True

    def merge(self, *args: Any, **kwargs: Any) -> None:
        """Merge adapters into the base; takes what PEFT's own takes."""
        with of_whole_tensors(self):
            super().merge(*args, **kwargs)  # type: ignore[misc]  # of the native class

    def unmerge(self, *args: Any, **kwargs: Any) -> None:
        """Take merged adapters out of the base."""
        with of_whole_tensors(self):
            super().unmerge(*args, **kwargs)  # type: ignore[misc]  # of the native class


def let_merge(layer: nn.Module, context: ShardContext) -> None:
    """Let ``layer``, whose adapters and base data parallelism alone divides, merge on whole tensors."""
    for one in nested(layer):
        if isinstance(one, BaseTunerLayer):
            Merging.swap_class(one, context)


@contextlib.contextmanager
def of_whole_tensors(layer: nn.Module) -> Iterator[None]:
    """Put whole plain tensors in the places of the parameters of ``layer``; each rank copies back its part of the base.

    Every rank of the mesh calls it. What is changed beside the base is forgotten.

    Raises:
        NotSupportedError: the base is packed in a way into which values are not brought again.
    """
    for name, parameter in layer.named_parameters():
        kind: Any = type(local_tensor(parameter))
        if is_packed(parameter) and not kind.takes_values:
            raise NotSupportedError(
                f"adapters are not merged into {name}, {kind.called}: save them (save_pretrained), and let PEFT merge "
                f"them into {kind.unsharded}: PeftModel.from_pretrained(base, folder).merge_and_unload()"
            )
    let_go(layer)
    there: list[tuple[dict[str, Any], str, Any]] = [
        (module._parameters, name, parameter)
        for module in layer.modules()
        for name, parameter in module._parameters.items()
        if isinstance(parameter, DTensor)
    ]
    whole = {parameter: nn.Parameter(_whole(parameter), requires_grad=False) for *_, parameter in there}
    for held, name, parameter in there:
        held[name] = whole[parameter]
    try:
        yield
        base: Any = layer.get_base_layer()  # type: ignore[operator]  # of the native class
        changed = {id(parameter) for parameter in base.parameters()}
        with torch.no_grad():
            for parameter, full in whole.items():
                if id(full) in changed:
                    parameter.copy_(part_of(full.detach(), parameter))
    finally:
        for held, name, parameter in there:
            held[name] = parameter


def _whole(parameter: DTensor) -> Tensor:
    # PEFT adds to quantized weights in the precision of the adapter, before it quantizes the sum.
    full: Tensor = parameter.full_tensor().detach()
    return full.float() if is_packed(parameter) else full


def let_go(layer: nn.Module) -> None:
    """Let FSDP2 put its DTensors back in ``layer``: after a forward with gradients, some are gathered still."""
    for unit in {unit for module in layer.modules() if (unit := unit_of(module)) is not None}:
        unit.module.reshard()  # type: ignore[operator]  # of FSDPModule
