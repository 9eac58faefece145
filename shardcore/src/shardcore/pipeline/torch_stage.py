"""Stages as `torch.distributed.pipelining` has them: one that fails goes on sending, so that nobody waits for it.

Its divided backward differs from torch's too: `add_gradients` is the second half, the gradients of parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.distributed.pipelining import PipelineStage

from shardcore.comm.gradients import ELSEWHERE
from shardcore.pipeline.metadata import filled

# Parameters, by what accumulates their gradients; and the nodes at which they meet what arrived, with the gradients
# that the first half of a backward had there.
_Group: TypeAlias = tuple[set[Node], dict[Node, tuple[Tensor | None, ...]]]


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


class StageModule(nn.Module):
    """What torch's stage calls: ``run`` for the micro-batch of a number and what arrived; ``owned`` are its parameters.

    At the first stage, which ``begins``, nothing arrives but the number.
    """

    def __init__(
        self,
        run: Callable[[int, list[Tensor]], tuple[Tensor, ...]],
        owned: Callable[[], list[nn.Parameter]],
        *,
        begins: bool,
    ) -> None:
        super().__init__()
        self._run, self._owned, self._begins = run, owned, begins

    def forward(self, *arrived: Tensor, number: Tensor) -> tuple[Tensor, ...]:
        """Return what crosses to the next stage, or the loss; none of it a view, all of it contiguous."""
        tensors = [_arrived(tensor) if tensor.is_floating_point() else tensor for tensor in arrived]
        left = self._run(int(number), [] if self._begins else tensors)
        return tuple(
            tensor.clone(memory_format=torch.contiguous_format)
            if tensor._base is not None or not tensor.is_contiguous()
            else tensor
            for tensor in left
        )

    def parameters(self, recurse: bool = True) -> Any:
        """Yield the parameters of the stage."""
        return iter(self._owned())


class SafeStage(PipelineStage):
    """A `PipelineStage` that keeps the first exception, of any kind, for its end, and sends zeros from then on.

    Every rank goes through the whole schedule, whatever happens on one of them: nobody waits for a message, and the
    process group can be used afterwards. What it is sent has the forms ``arrives``, what it sends ``leaves``.
    """

    def __init__(
        self,
        module: StageModule,
        index: int,
        count: int,
        arrives: tuple[Tensor, ...],
        leaves: tuple[Tensor, ...],
        device: torch.device,
        group: Any,
    ) -> None:
        super().__init__(module, index, count, device, input_args=arrives, output_args=leaves, group=group)
        self._arrives, self._leaves = arrives, leaves
        self.failure: BaseException | None = None

    def forward_one_chunk(self, fwd_chunk_id: int, args: Any, kwargs: Any = None, *more: Any, **options: Any) -> Any:
        """Run the forward of a micro-batch, or send zeros if something failed."""
        if self.failure is None:
            try:
                return super().forward_one_chunk(fwd_chunk_id, args, kwargs, *more, **options)
            except BaseException as error:
                self._failed(error)
        out = filled(self._leaves, self.device, 0)
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
        self.bwd_cache[bwd_chunk_id] = () if self.is_first else (None,) * len(self._arrives)

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


def add_gradients(parameters: Iterable[nn.Parameter], groups: Sequence[dict[str, Any]]) -> None:
    """Add to ``parameters`` their gradients, in the order of ``groups``.

    Of torch's ``stage_backward_weight`` it differs where a parameter meets what arrived at several nodes, as that of a
    block that is called twice does. The way back from one of them may lead through another one, and through nodes of
    other groups: the graph is kept until all are done, and each node passes on what the first half had there. A
    parameter is in one group. ``groups``, as ``stage_backward_input`` returns them, are empty afterwards.
    """
    owners = {get_gradient_edge(parameter).node: parameter for parameter in parameters if parameter.requires_grad}
    apart = _disjoint(groups)
    keeps = any(len(nodes) > 1 for _, nodes in apart)
    for accumulating, nodes in apart:
        edges = [(GradientEdge(node, n), grad) for node, grads in nodes.items() for n, grad in enumerate(grads)]
        edges = [(edge, grad) for edge, grad in edges if grad is not None]
        if not edges:
            continue
        handles = (
            [node.register_prehook(lambda _, grads=grads: grads) for node, grads in nodes.items()] if keeps else []
        )
        try:
            found = torch.autograd.grad(
                [edge for edge, _ in edges],
                [GradientEdge(node, 0) for node in accumulating],
                [grad for _, grad in edges],
                retain_graph=keeps,
            )
        finally:
            for handle in handles:
                handle.remove()
        for node, grad in zip(accumulating, found, strict=True):
            owner = owners[node]
            owner.grad = grad if owner.grad is None else owner.grad.add_(grad)


def _disjoint(groups: Sequence[dict[str, Any]]) -> list[_Group]:
    """Return the groups, those that share a parameter as one: torch has some twice."""
    apart: list[_Group] = []
    for group in groups:
        passed = zip(group["intermediates"], group.get("grads", ()), strict=False)  # no grads: none of them was passed
        nodes = {node: grads for node, grads in passed if grads is not None}
        one: _Group = (set(group["params"]), nodes)
        for other in [other for other in apart if other[0] & one[0]]:
            apart.remove(other)
            one = (other[0] | one[0], other[1] | one[1])
        apart.append(one)
        group.clear()
    return apart
