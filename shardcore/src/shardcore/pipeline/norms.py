"""One norm of the gradients of a model of which every rank has other parts, some of them copies."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial

from shardcore.comm.dtensor_params import local_tensor
from shardcore.errors import ConfigError
from shardcore.mesh.axes import group_of
from shardcore.mesh.context import context_of, unwrapped
from shardcore.pipeline.engine import pipeline_of


@torch.no_grad()
def grad_norm(model: nn.Module) -> Tensor:
    """Return the 2-norm of all gradients of a model, the same plain number on every rank; nothing is changed.

    For logging. ``p.grad.norm().item()`` of a sharded parameter is the norm of this rank's part, without a word.
    `torch.nn.utils.clip_grad_norm_` returns the norm of the whole model too, but for one with a pipeline.

    Args:
        model: sharded, over any axes, or not; or one that holds sharded models, or a part of one (of a pipeline the
            whole model). Every rank of what is sharded has to make the call. Parameters without a gradient are left
            out; plain ones count once.

    Returns:
        a tensor (), float64. One small all-reduce for each mesh that parameters lie on.

    Raises:
        ConfigError: gradients are partial still; call `shardcore.reduce_partial_gradients` first.
    """
    model = unwrapped(model)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # after a forward the root's parameters stay gathered, and those have no gradients
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    total = torch.zeros((), dtype=torch.float64, device=device)
    counted: set[int] = set()
    for part in model.modules():
        pipeline, context = pipeline_of(part), context_of(part)
        if pipeline is not None and context is not None:
            elsewhere = pipeline.shared.counted_elsewhere(pipeline.ranks.rank)
            copies = context.mesh.size() // context.sizes.pp
            squares = _squared_norm(part.named_parameters(), elsewhere, copies, context.device)
            dist.all_reduce(squares, group=group_of(context.mesh))
            total += squares
            counted |= {id(parameter) for parameter in part.parameters()}
    # By the meshes of parameters, which all ranks have alike, whatever has a gradient on one of them.
    of_mesh: dict[DeviceMesh | None, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        if id(parameter) not in counted:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            of_mesh.setdefault(mesh, []).append((name, parameter))
    for mesh, named in of_mesh.items():
        squares = _squared_norm(named, (), 1 if mesh is None else mesh.size(), device)
        if mesh is not None:
            squares = squares.to(mesh.device_type)  # FSDP2 may keep gradients on the host
            dist.all_reduce(squares, group=group_of(mesh))
        total += squares.to(device)
    return total.sqrt()


def _squared_norm(
    parameters: Iterable[tuple[str, nn.Parameter]], again: Collection[int], ranks: int, device: torch.device
) -> Tensor:
    """Return this rank's summand of the squared norm of all gradients: (), float64; the sum is over all ranks.

    torch's own norms stack those of all gradients, which have to lie on one mesh for that. Parameters with ids in
    ``again`` count as another rank's of the pipeline; of all others so many ``ranks`` have a part, or a copy.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for name, parameter in parameters:
        grad = parameter.grad
        if grad is None or id(parameter) in again:
            continue
        parts = 1
        if isinstance(grad, DTensor):
            if any(isinstance(placement, Partial) for placement in grad.placements):
                raise ConfigError(
                    f"the gradient of {name} is this rank's summand; call shardcore.reduce_partial_gradients(model) "
                    "before the norm is taken"
                )
            for placement, size in zip(grad.placements, grad.device_mesh.shape, strict=True):
                parts *= 1 if placement.is_replicate() else size
        total += local_tensor(grad).double().square().sum() * (parts / ranks)
    return total


@torch.no_grad()
def clip_grads(model: nn.Module, norm: Tensor, max_norm: float) -> None:
    """Scale all gradients so that their norm, which is ``norm``, is at most ``max_norm``."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_ has it
    for parameter in model.parameters():
        if parameter.grad is not None:
            local = local_tensor(parameter.grad)
            local.mul_(factor.to(local.dtype))
