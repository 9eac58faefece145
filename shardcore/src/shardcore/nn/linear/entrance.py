"""Whether the input of a member of a region came in through the region's entry.

The entry is a hook on the call of a module. Whoever calls that module's ``forward``, or the member by itself, bypasses
it: the output is right, but the gradient of the input is partial. So members look for the entry in the graph of their
input, unless the tensor itself carries the open region.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shardcore.comm import collectives, sequence
from shardcore.comm.flow import ELSEWHERE
from shardcore.errors import NotSupportedError
from shardcore.nn.region import region

if TYPE_CHECKING:
    from shardcore.nn.linear.parallel import ColumnLinear

__all__ = ["require_entered"]

#: Entries that tell nothing of their members; a graph of the compiler's may hold any.
_ANY_ENTRY = (collectives._CopyToTP, sequence._EnterFromSequence)
_COMPILED = "CompiledFunction"
#: Where regions end: behind them are the entries of other regions, or of an earlier call.
_EXITS = (collectives._ReduceFromTP, collectives._ReduceFromTPInPlace, sequence._LeaveToSequence)


def require_entered(member: ColumnLinear, x: Tensor) -> None:
    """Refuse ``x`` if it needs a gradient and was not entered.

    Raises:
        NotSupportedError: the gradient would be partial.
    """
    # The graph of what a reentrant checkpoint recomputes begins inside of the region.
    if not x.requires_grad or hasattr(x, region.OPEN) or region.backward_is_running() or _is_entered(member, x):
        return
    raise NotSupportedError(
        f"a {type(member).__name__} ({member.in_features} to {member.out_features} features) inside of a "
        "tensor-parallel region was called with a tensor that did not enter it: each rank would have a summand of its "
        "gradient. Call the block, or the attention or MLP in it, as a module: layer.mlp(x), not layer.mlp.forward(x), "
        "nor the linear by itself. Without gradients (torch.no_grad(), a detached tensor) it returns this rank's part."
    )


def _is_entered(member: ColumnLinear, x: Tensor) -> bool:
    queue: deque[Any] = deque([x.grad_fn])
    seen = {None}
    while queue:  # breadth first: the entry is a few nodes away
        node = queue.popleft()
        if node in seen:
            continue
        seen.add(node)
        made_by = getattr(type(node), "_forward_cls", None)  # of nodes that Python functions made
        if made_by in _ANY_ENTRY or getattr(made_by, "__name__", "") == _COMPILED:
            return True
        if getattr(made_by, "flow", None) is ELSEWHERE:
            return True  # a tensor that many regions use may have entered on another stage of a pipeline
        if region.entered_for(node, member):
            return True
        if made_by not in _EXITS:
            queue.extend(next_node for next_node, _ in node.next_functions)
    return False
