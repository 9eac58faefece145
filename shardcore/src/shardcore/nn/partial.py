"""The deferred mode of partial gradients: one bucket for each step."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import DTensor, Partial

from shardcore.comm.reads import all_reduce_bucket, local_tensor, spec_of, with_spec
from shardcore.errors import ConfigError
from shardcore.mesh import context_of, is_alone

__all__ = ["reduce_partial_gradients"]


def reduce_partial_gradients(model: nn.Module) -> None:
    """Sum the gradients that are still partial over the tensor-parallel ranks, in one bucket for each dtype.

    For models sharded with ``partial_gradients="deferred"``: call it on every rank once per optimizer step, after the
    last backward and before clipping. In the default mode, and under FSDP2 (which sums them by itself), there is
    nothing left to sum and it does nothing. Forgetting it costs time, not correctness: partial gradients are
    DTensors that say so, and torch sums them at each use.

    Args:
        model: a sharded model.

    Raises:
        ConfigError: the model was not sharded.
    """
    context = context_of(model)
    if context is None and is_alone(model):
        return
    if context is None:
        raise ConfigError(
            f"reduce_partial_gradients got a {type(model).__name__} that was not sharded; call shard() first"
        )
    waiting = [p for p in model.parameters() if isinstance(p.grad, DTensor) and _is_partial(p.grad)]
    if not waiting:
        return
    summed = all_reduce_bucket([local_tensor(p.grad) for p in waiting if p.grad is not None], context)
    for parameter, grad in zip(waiting, summed, strict=True):
        parameter.grad = with_spec(grad, spec_of(parameter))


def _is_partial(grad: DTensor) -> bool:
    return any(isinstance(placement, Partial) for placement in grad.placements)
