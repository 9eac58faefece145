"""The forwards of a pipeline alone: for evaluation, on every placement of stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shardcore.pipeline.steps import Run

__all__ = ["forward_only"]

Call = Callable[[int, int, list[Tensor]], tuple[Tensor, ...]]


def forward_only(
    call: Call, run: Run, *, ranks: Sequence[int], group: ProcessGroup, device: torch.device
) -> BaseException | None:
    """Run all micro-batches through all stages; a rank has all of them at a stage before it goes to its next one.

    A rank that fails sends zeros from then on, so that nobody waits for it.

    Args:
        call: called with the number of a stage of this rank, that of a micro-batch, and what arrived.
        run: the micro-batches.
        ranks: the rank of each stage.
        group: the process group of the pipeline.
        device: where tensors arrive.

    Returns:
        The first exception of this rank; None if there was none.
    """
    me, failure, sends = dist.get_rank(group), None, []
    crossings = run.script.crossings
    kept: dict[tuple[int, int], list[Tensor]] = {}
    for stage in (stage for stage, rank in enumerate(ranks) if rank == me):
        for micro_batch in run.numbers(run.count):
            arrived = kept.pop((stage, micro_batch), [])
            if stage and ranks[stage - 1] != me:
                arrived = [torch.empty(v.shape, dtype=v.dtype, device=device) for v in crossings[stage - 1].values]
                for tensor in arrived:
                    dist.recv(tensor, group=group, group_src=ranks[stage - 1])
            leaving: tuple[Tensor, ...] = ()
            if failure is None:
                try:
                    leaving = call(stage, micro_batch, arrived)
                except BaseException as error:
                    failure = error
            if stage == len(ranks) - 1:
                continue
            if failure is not None:
                values = crossings[stage].values
                leaving = tuple(torch.zeros(v.shape, dtype=v.dtype, device=device) for v in values)
            if ranks[stage + 1] == me:
                kept[stage + 1, micro_batch] = list(leaving)
            else:
                own = [tensor.contiguous() for tensor in leaving]
                sends += [(dist.isend(tensor, group=group, group_dst=ranks[stage + 1]), tensor) for tensor in own]
    for work, _ in sends:  # which holds its tensor until it is gone
        if work is not None:
            work.wait()
    return failure
