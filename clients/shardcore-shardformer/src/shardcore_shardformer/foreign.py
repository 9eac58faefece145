"""Local parameters that a user's code makes become DTensors, so that every parameter of a sharded model is one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardcore.mesh.context import ShardContext
from shardcore.nn import Layout, Replicated, ReplicatedLayout, ShardedLayout

Shape = tuple[int, ...]


def local_problem(
    module: nn.Module, native: Mapping[str, Shape], context: ShardContext, *, recurse: bool = True
) -> str | None:
    """Say why the plain parameters of ``module`` cannot be parts of the native ones, or return None.

    Args:
        module: the module that a user's code made or changed.
        native: the full shapes, by parameter name.
        context: of the sharded model.
        recurse: look at submodules too.
    """
    for path, owner, name, parameter in _plain(module, recurse):
        full = native.get(f"{path}.{name}" if path else name)
        if full is None:
            return f"it has a parameter {name!r} that the native module lacks ({', '.join(native) or 'none'})"
        if _layout(full, tuple(parameter.shape), context) is None:
            return (
                f"its parameter {name!r} of {type(owner).__name__} has shape {tuple(parameter.shape)}, neither "
                f"the full shape {full} nor rank {context.rank}'s part of it along one dim (as torch.chunk cuts it)"
            )
    return None


def distribute_local_parameters(
    module: nn.Module, native: Mapping[str, Shape], context: ShardContext, *, recurse: bool = True
) -> None:
    """Turn plain local parameters into DTensors; the modules that own them keep reading local tensors."""
    owners: dict[int, nn.Module] = {}
    made: dict[int, nn.Parameter] = {}
    for path, owner, name, parameter in list(_plain(module, recurse)):
        owners[id(owner)] = owner
        if id(parameter) in made:  # tied: one parameter stays one
            owner._parameters[name] = made[id(parameter)]
            continue
        full = native[f"{path}.{name}" if path else name]
        layout = _layout(full, tuple(parameter.shape), context)
        if layout is None:
            raise AssertionError("checked by local_problem")
        stride = torch.empty(full, device="meta").stride()
        distributed = DTensor.from_local(
            parameter.detach().contiguous(),
            context.tp,
            (layout.placement,),
            run_check=False,
            shape=torch.Size(full),
            stride=stride,
        )
        made[id(parameter)] = nn.Parameter(distributed, requires_grad=parameter.requires_grad)
        owner._parameters[name] = made[id(parameter)]
    for owner in owners.values():
        Replicated.swap_class(owner, context)


def _plain(module: nn.Module, recurse: bool) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    for path, owner in module.named_modules() if recurse else [("", module)]:
        for name, parameter in owner._parameters.items():
            if parameter is not None and not isinstance(parameter, DTensor):
                yield path, owner, name, parameter


def _layout(full: Shape, local: Shape, context: ShardContext) -> Layout | None:
    candidates: list[Layout] = [ReplicatedLayout(), *(ShardedLayout(dim) for dim in range(len(full)))]
    return next((c for c in candidates if c.shape(full, context.size, context.rank) == local), None)
