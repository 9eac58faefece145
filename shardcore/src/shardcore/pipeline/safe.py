"""A stage of torch's pipelines that goes on sending after it failed, so that nobody waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from shardcore.comm.flow import ELSEWHERE
from shardcore.pipeline.divided import add_gradients
from shardcore.pipeline.script import Value

__all__ = ["Chunk", "SafeStage"]


class Arrived(torch.autograd.Function):
    """What arrived as it is, whose gradient is contiguous, as what travels has to be."""

    flow = ELSEWHERE

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        """Return the tensor as it is."""
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Return its gradient."""
        return grad.contiguous()


_arrived: Callable[[Tensor], Tensor] = Arrived.apply


class Chunk(nn.Module):
    """What torch's stage calls: one stage for the micro-batch of a number. Its parameters are those of the stage."""

    def __init__(
        self, run: Callable[[int, list[Tensor]], tuple[Tensor, ...]], owned: Callable[[], list[nn.Parameter]]
    ) -> None:
        super().__init__()
        self._run, self._owned = run, owned

    def forward(self, *arrived: Tensor, number: Tensor) -> tuple[Tensor, ...]:
        """Return what crosses to the next stage, or the loss; none of it a view, all of it contiguous."""
        tensors = [_arrived(tensor) for tensor in arrived if tensor.is_floating_point()]
        left = self._run(int(number), tensors)
        return tuple(map(_to_be_sent, left))

    def parameters(self, recurse: bool = True) -> Any:
        """Yield the parameters of the stage."""
        return iter(self._owned())


def _to_be_sent(tensor: Tensor) -> Tensor:
    if tensor._base is not None or not tensor.is_contiguous():
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


class SafeStage(PipelineStage):
    """A `PipelineStage` that keeps the first exception, of any kind, for its end, and sends zeros from then on.

    Every rank goes through the whole schedule, whatever happens on one of them: nobody waits for a message, and the
    process group can be used afterwards.

    Args:
        chunk: what it runs.
        index: which stage it is.
        count: of how many.
        values: what arrives, and what leaves.
        device: where it runs.
        group: the process group of the pipeline.
    """

    def __init__(
        self,
        chunk: Chunk,
        index: int,
        count: int,
        values: tuple[tuple[Value, ...], tuple[Value, ...]],
        device: torch.device,
        group: Any,
    ) -> None:
        arrives, leaves = (tuple(_meta(value) for value in some) for some in values)
        super().__init__(chunk, index, count, device, input_args=arrives, output_args=leaves, group=group)
        self._values = values
        self.failure: BaseException | None = None

    def forward_one_chunk(self, fwd_chunk_id: int, args: Any, kwargs: Any = None, *more: Any, **options: Any) -> Any:
        """Run the forward of a micro-batch, or send zeros if something failed."""
        if self.failure is None:
            try:
                return super().forward_one_chunk(fwd_chunk_id, args, kwargs, *more, **options)
            except BaseException as error:
                self._failed(error)
        out = tuple(torch.zeros(v.shape, dtype=v.dtype, device=self.device) for v in self._values[1])
        self.fwd_cache[fwd_chunk_id] = (out, [])
        if self.is_last:
            self.output_chunks.append(out)
        return out

    def backward_one_chunk(self, bwd_chunk_id: int, *more: Any, **options: Any) -> None:
        """Run the backward of a micro-batch, or send zeros if something failed."""
        if self.failure is None:
            try:
                super().backward_one_chunk(bwd_chunk_id, *more, **options)
            except BaseException as error:
                self._failed(error)
            else:
                return
        self.fwd_cache.pop(bwd_chunk_id, None)
        self.dw_runner[bwd_chunk_id] = lambda: None
        self.bwd_cache[bwd_chunk_id] = () if self.is_first else (None,) * len(self._values[0])

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *more: Any, **options: Any) -> None:
        """Compute the gradients of the parameters for a micro-batch, unless something failed."""
        if self.failure is None:
            try:
                super().backward_weight_one_chunk(bwd_chunk_id, *more, **options)
            except BaseException as error:
                self._failed(error)

    def backward_maybe_with_nosync(self, backward_type: Any, bwd_kwargs: Any, *more: Any, **options: Any) -> Any:
        """Run a backward of torch's, but for the one of parameters alone."""
        if backward_type != "weight":
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, *more, **options)
        add_gradients(self.submod.parameters(), bwd_kwargs["param_groups"])
        return (), None

    def _failed(self, error: BaseException) -> None:
        cause = error.__cause__
        self.failure = cause if isinstance(cause, BaseException) else error  # torch's tells the shapes of what arrived


def _meta(value: Value) -> Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device="meta", requires_grad=value.dtype.is_floating_point)
