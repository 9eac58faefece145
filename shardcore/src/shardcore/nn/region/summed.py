"""Whether the gradient of a tensor is summed, or belongs to this rank alone, before it reaches anything shared.

What arrives in a region beside its input gets the gradient of this rank's heads. That is right if each way back from
the tensor passes an entry, where gradients are summed, or ends in parameters of which each rank holds its own part. It
is wrong if one ends in what all ranks hold alike. The graph of such tensors is short: a table, a few views, a mask.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardcore._torch import backward_task
from shardcore.comm import collectives, dtensor_params, neighbours, sequence
from shardcore.comm.flow import ELSEWHERE

__all__ = ["shared_source"]

#: Behind these nodes the gradient is summed, or what is there belongs to this rank.
_SUMS = (
    collectives._CopyToTP,
    collectives._SplitToTP,
    sequence._EnterFromSequence,
    dtensor_params._ReadPartial,
    neighbours._GatherRows,
)
_ENTRIES = ("_EnterRegion", "_EnteredLinear", "CompiledFunction")  # the last may hold any
#: What these return is the same on all ranks.
_EXITS = (
    collectives._ReduceFromTP,
    collectives._ReduceFromTPInPlace,
    collectives._GatherFromTP,
    sequence._LeaveToSequence,
    sequence._GatherSequence,
)
#: What FSDP2 puts around the arguments of a unit, to know when its backward ends: an output is the input at its place.
_ONE_TO_ONE = "RegisterPostBackwardFunction"


def shared_source(x: Tensor, *, local: bool = False) -> str | None:
    """Say what all ranks hold alike that the gradient of ``x`` would reach as this rank's summand; None if nothing.

    With ``local``, tensors that are no parameters are taken to hold what this rank alone has, as ``x`` does: T5 makes
    zeros that need a gradient for its checkpoints. Nothing can be said in compiled code, nor of what a reentrant
    checkpoint recomputes, whose graph begins at ``x``.
    """
    if not x.requires_grad or torch.compiler.is_compiling() or backward_task() != -1:
        return None
    if x.grad_fn is None:
        return None if _is_own(x, local=local) else f"a tensor {tuple(x.shape)} that every rank holds whole"
    queue: deque[Any] = deque([(x.grad_fn, x.output_nr)])
    seen = set()
    while queue:
        node, output = queue.popleft()
        if node is None or (node, output) in seen:
            continue
        seen.add((node, output))
        made_by = getattr(type(node), "_forward_cls", None)  # of nodes that Python functions made
        if made_by in _SUMS or getattr(made_by, "__name__", "") in _ENTRIES:
            continue
        if getattr(made_by, "flow", None) is ELSEWHERE:
            continue  # the stage of a pipeline that it came from has made it on as many ranks, and entered it
        if made_by in _EXITS:
            return "activations that all ranks hold alike"
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor) and not _is_own(leaf, local=local):
            kind = "parameter" if isinstance(leaf, nn.Parameter) else "tensor"
            return f"a {kind} {tuple(leaf.shape)} that every rank holds whole"
        further = node.next_functions
        queue.extend(further[output : output + 1] if getattr(made_by, "__name__", "") == _ONE_TO_ONE else further)
    return None


def _is_own(leaf: Tensor, *, local: bool) -> bool:
    if not isinstance(leaf, DTensor):
        return local and not isinstance(leaf, nn.Parameter)
    return dtensor_params.splits_on_tp(leaf)
