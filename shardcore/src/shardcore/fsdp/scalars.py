"""Parameters that FSDP2 is not to divide over the data axes: every replica holds all that ``tp`` leaves of them.

Those without dims, of which there is nothing to divide, and those that come after FSDP2 was applied. They are DTensors
that are replicated on the mesh that FSDP2 puts its own on, so optimizers and clipping see one mesh. Each backward
averages their gradients over the replicas, as FSDP2 does with those that it divides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate

from shardcore.comm.dtensor_params import local_tensor, spec_of, with_spec
from shardcore.mesh.context import ShardContext
from shardcore.nn.replicated import Replicated


def replicate_scalars(model: nn.Module, context: ShardContext, axes: Sequence[str]) -> set[nn.Parameter]:
    """Replicate the parameters of ``model`` without dims over the data axes, in place, and return them.

    The model was sharded along ``tp`` before; its mesh calls the data axes ``axes``.
    """
    replicated: dict[int, nn.Parameter] = {}
    for module in list(model.modules()):
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.ndim:
                continue
            if id(parameter) not in replicated:
                replicated[id(parameter)] = on_replicas(parameter, context, axes)
            module._parameters[name] = replicated[id(parameter)]
            if context.size == 1:
                Replicated.swap_class(module, context)  # else its policy has said so
    return set(replicated.values())


def on_replicas(parameter: nn.Parameter, context: ShardContext, axes: Sequence[str]) -> nn.Parameter:
    """Return a parameter with the values of ``parameter`` that each replica holds, and whose gradients are averaged.

    ``parameter`` is plain, or as it lies on ``tp``; the mesh of the model calls the data axes ``axes``.
    """
    parameters = context.parameters
    mesh = parameters[(*axes, "tp")] if context.size > 1 else parameters[tuple(axes)]
    placements: list[Placement] = [Replicate() for _ in range(mesh.ndim)]
    if isinstance(parameter, DTensor):
        placements[len(axes) :] = parameter.placements
    local = local_tensor(parameter).detach()
    whole = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=parameter.shape, stride=tuple(parameter.stride())
    )
    groups = [parameters.get_group(axis) for axis in axes]
    ranks = math.prod(group.size() for group in groups)

    def average(grad: Tensor) -> Tensor:
        mean = local_tensor(grad) / ranks
        for group in groups:
            dist.all_reduce(mean, group=group)
        return with_spec(mean, spec_of(grad))

    made = nn.Parameter(whole)
    made.register_hook(average)  # of one that is frozen too: it may be trained later
    made.requires_grad_(parameter.requires_grad)
    return made
