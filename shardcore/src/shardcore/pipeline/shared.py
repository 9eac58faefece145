"""Parameters that several ranks of a pipeline hold: tied weights, and what every stage needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardcore.mesh import device_type_of
from shardcore.pipeline.cut import Cut

__all__ = ["Shared", "shared_parameters"]


@dataclass(frozen=True, slots=True)
class Shared:
    """The parameters that several ranks hold, and which ranks these are.

    Attributes:
        model: of this rank.
        found: for each parameter, its names in the whole model, the ranks that hold it under one of them, and one of
            its shape and dtype on meta.
    """

    model: nn.Module
    found: Sequence[tuple[tuple[str, ...], tuple[int, ...], Tensor]]

    def counted_elsewhere(self, rank: int) -> set[int]:
        """Return the ids of the parameters that count as another rank's: the first one's that holds them."""
        held = dict(self.model.named_parameters(remove_duplicate=False))
        return {id(held[name]) for names, ranks, _ in self.found if ranks[0] != rank for name in names if name in held}

    def set_aside(self) -> dict[str, Tensor]:
        """Take the gradients of these parameters away, which are sums already, and return them by name."""
        held = dict(self.model.named_parameters(remove_duplicate=False))
        kept = {}
        for name in (name for names, _, _ in self.found for name in names if name in held):
            if (grad := held[name].grad) is not None:
                kept[name], held[name].grad = grad, None
        return kept

    def add(self, group: ProcessGroup, kept: Mapping[str, Tensor]) -> None:
        """Give every copy of a parameter the sum of the gradients of all copies, bit for bit the same.

        Two ranks send each other theirs, whose sum does not depend on the order. Of more ranks all take part in one
        sum, those without the parameter with nothing in it.

        Args:
            group: the process group of the pipeline.
            kept: what `set_aside` returned before these gradients were computed; added to the sums.
        """
        device = device_type_of(group)
        held = dict(self.model.named_parameters(remove_duplicate=False))
        for names, ranks, like in self.found:
            own = next((held[name] for name in names if name in held), None)
            if len(ranks) == 2 and own is None:
                continue
            grad = torch.zeros_like(like, device=device) if own is None or own.grad is None else own.grad
            if len(ranks) == 2:
                grad = grad + _exchanged(grad, ranks, group)
            else:
                dist.all_reduce(grad, group=group)
            if own is not None:
                before = next((kept[name] for name in names if name in kept), None)
                own.grad = grad if before is None else before + grad


def _exchanged(grad: Tensor, ranks: tuple[int, ...], group: ProcessGroup) -> Tensor:
    other = next(rank for rank in ranks if rank != dist.get_rank(group))
    peer = dist.get_global_rank(group, other)
    sent, got = grad.contiguous(), torch.empty_like(grad, memory_format=torch.contiguous_format)
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, peer, group), dist.P2POp(dist.irecv, got, peer, group)]
    ):
        work.wait()
    return got


def shared_parameters(model: nn.Module, cut: Cut, ranks: Sequence[int]) -> Shared:
    """Return what several ranks hold of ``model``, which is whole.

    Args:
        model: the model.
        cut: how it is cut.
        ranks: the rank of each stage.
    """
    found: dict[int, tuple[list[str], set[int], Tensor]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        entry = cut.stages.holder(name)
        stage = None if entry is None else cut.holder(entry)
        names, holders, _ = found.setdefault(id(parameter), ([], set(), parameter.detach().to("meta")))
        names.append(name)
        holders.update(ranks if stage is None else [ranks[stage]])
    several = [(tuple(names), tuple(sorted(on)), like) for names, on, like in found.values() if len(on) > 1]
    return Shared(model, several)
