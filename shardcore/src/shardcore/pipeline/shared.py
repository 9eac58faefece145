"""Parameters that several ranks of a pipeline hold: tied weights, and what every stage needs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardcore.comm.dtensor_params import local_tensor, spec_of, with_spec
from shardcore.plan.cut import Cut


@dataclass(frozen=True, slots=True)
class SharedParameters:
    """The parameters of ``model`` that several ranks hold, and which ranks these are."""

    model: nn.Module
    #: For each: its names in the whole model, and the ranks of the pipeline that hold it under one of them.
    found: Sequence[tuple[tuple[str, ...], tuple[int, ...]]]

    @classmethod
    def of(cls, model: nn.Module, cut: Cut, ranks: Sequence[int]) -> Self:
        """Return what several ranks hold of ``model``, which is whole; ``ranks`` has the rank of each stage."""
        found: dict[int, tuple[list[str], set[int]]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            entry = cut.stages.holder(name)
            stage = None if entry is None else cut.holder(entry)
            names, holders = found.setdefault(id(parameter), ([], set()))
            names.append(name)
            holders.update(ranks if stage is None else [ranks[stage]])
        return cls(model, [(tuple(names), tuple(sorted(on))) for names, on in found.values() if len(on) > 1])

    def counted_elsewhere(self, rank: int) -> set[int]:
        """Return the ids of the parameters that are not counted by ``rank``: the first one that holds them does."""
        held = dict(self.model.named_parameters(remove_duplicate=False))
        return {id(held[name]) for names, ranks in self.found if ranks[0] != rank for name in names if name in held}

    def names(self) -> set[str]:
        """Return the names of these parameters."""
        return {name for names, _ in self.found for name in names}

    def add(self, group: ProcessGroup) -> None:
        """Give every copy of a parameter the sum of the gradients of all copies, bit for bit the same.

        The ranks that hold a copy send each other theirs, and add them up in the order of the ranks.
        """
        held = dict(self.model.named_parameters(remove_duplicate=False)) if self.found else {}
        for names, ranks in self.found:
            own = next((held[name] for name in names if name in held), None)
            if own is None or not own.requires_grad:
                continue
            part = torch.zeros_like(local_tensor(own)) if own.grad is None else local_tensor(own.grad)
            total = functools.reduce(torch.add, _exchanged(part, ranks, group))
            own.grad = with_spec(total, spec_of(own if own.grad is None else own.grad))


def _exchanged(part: Tensor, ranks: tuple[int, ...], group: ProcessGroup) -> list[Tensor]:
    """Return what each of ``ranks``, this one among them, has in the place of ``part``."""
    me, sent, works = dist.get_rank(group), part.contiguous(), []
    got = [sent if rank == me else torch.empty_like(sent) for rank in ranks]
    for rank, tensor in zip(ranks, got, strict=True):
        if rank != me:
            peer = dist.get_global_rank(group, rank)
            works += [dist.P2POp(dist.isend, sent, peer, group), dist.P2POp(dist.irecv, tensor, peer, group)]
    for work in dist.batch_isend_irecv(works):
        work.wait()
    return got
