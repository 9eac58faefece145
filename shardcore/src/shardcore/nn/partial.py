"""The deferred mode of partial gradients: one bucket for each step."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardcore._torch import SCALES_PARTIAL
from shardcore.comm.dtensor_params import all_reduce_bucket, local_tensor, spec_of, with_spec
from shardcore.errors import ConfigError, NotSupportedError
from shardcore.mesh.context import ShardContext, context_of, is_alone, unwrapped


def reduce_partial_gradients(model: nn.Module) -> None:
    """Sum the gradients that are still partial over the tensor-parallel ranks, in one bucket for each dtype.

    For models sharded with ``partial_gradients="deferred"``: call it on every rank once per optimizer step, after the
    last backward and before clipping. In the default mode, and under FSDP2 (which sums them by itself), there is
    nothing left to sum and it does nothing. Forgetting it costs time, not correctness: partial gradients are
    DTensors that say so, and torch sums them at each use. Before torch 2.13, which clips them wrongly, an optimizer
    that finds them raises `NotSupportedError` before its step.

    Args:
        model: a sharded model, or one that holds sharded models.

    Raises:
        ConfigError: nothing of it was sharded.
    """
    model = unwrapped(model)
    sharded = [(part, context) for part in model.modules() if (context := context_of(part)) is not None]
    if not sharded and not any(map(is_alone, model.modules())):
        raise ConfigError(
            f"reduce_partial_gradients got a {type(model).__name__} that was not sharded; call shard() first"
        )
    for part, context in sharded:
        _reduce(part, context)


def _reduce(model: nn.Module, context: ShardContext) -> None:
    waiting = [p for p in model.parameters() if isinstance(p.grad, DTensor) and _is_partial(p.grad)]
    if not waiting:
        return
    summed = all_reduce_bucket([local_tensor(p.grad) for p in waiting if p.grad is not None], context.channel)
    for parameter, grad in zip(waiting, summed, strict=True):
        parameter.grad = with_spec(grad, spec_of(parameter))


def require_sums(model: nn.Module) -> None:
    """Let optimizers refuse a step of ``model`` with partial gradients, if this torch clips those wrongly.

    The hook is one of all optimizers, because the model's own is not made yet; it looks at no other model.
    """
    if SCALES_PARTIAL:
        return
    reference = weakref.ref(model, lambda _: hook.remove())

    def refuse(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        model = reference()
        if model is None:
            return
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, parameter in model.named_parameters():
            grad = parameter.grad
            if id(parameter) in stepped and isinstance(grad, DTensor) and _is_partial(grad):
                raise NotSupportedError(
                    f"{type(optimizer).__name__}.step with a partial gradient of {name}, which torch "
                    f"{torch.__version__} would have clipped wrongly: call shardcore.reduce_partial_gradients(model) "
                    "on every rank after the last backward and before clipping, or use torch 2.13 or newer"
                )

    hook = register_optimizer_step_pre_hook(refuse)


def _is_partial(grad: DTensor) -> bool:
    return any(isinstance(placement, Partial) for placement in grad.placements)
