"""Agreement between ranks before a model is changed: one collective, one error on all ranks.

Every rank contributes either its error or what it holds (plan, configuration, a checksum of every tensor). If anything
differs, or any rank failed, all ranks raise, and nothing was changed anywhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardcore.errors import AgreementError

__all__ = ["Report", "agree", "checksums"]

# Words are summed in squares of this side, row by row and column by column.
_SIDE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one rank brings to the agreement.

    Attributes:
        error: the rank's error as text; None if it has none.
        items: (name, value) pairs that must be equal on all ranks, the most telling first.
        seed: the rank's own random seed; the group takes the first rank's.
    """

    error: str | None = None
    items: tuple[tuple[str, str], ...] = ()
    seed: int = 0

    @classmethod
    def of_error(cls, error: BaseException) -> Report:
        """Return the report of a rank that failed."""
        return cls(error=f"{type(error).__name__}: {error}")


def checksums(model: nn.Module, *, values: bool = True) -> list[tuple[str, str]]:
    """Return (name, what must agree) for every parameter and buffer of ``model``, in its order.

    That is the shape, the dtype, whether it is on the meta device or frozen and, with ``values``, a checksum.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [(f"{name} {tuple(t.shape)} {t.dtype}", _state(t, values)) for name, t in tensors]


def _state(tensor: Tensor, values: bool) -> str:
    content = "meta" if tensor.is_meta else _checksum(tensor) if values else "any value"
    return f"{content}, trainable" if tensor.requires_grad else content


def _checksum(tensor: Tensor) -> str:
    if tensor.device.type == "meta" or tensor.numel() == 0:
        return ""
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    aligned = raw.numel() % 4 == 0 and raw.storage_offset() % 4 == 0
    words = raw.view(torch.int32) if aligned else raw
    squares = words[: words.numel() // _SIDE**2 * _SIDE**2].view(-1, _SIDE, _SIDE)
    # Sums along both ways of a square: values that changed places change some of them.
    sums = torch.cat([squares.sum(dim, dtype=torch.int64).view(-1) for dim in (1, 2)])
    rest = words[squares.numel() :]
    content = sums.cpu().numpy().tobytes() + rest.cpu().numpy().tobytes()
    return hashlib.sha256(content).hexdigest()[:16]


def agree(own: Report, failure: BaseException | None = None, *, changing: bool = False) -> Sequence[Report]:
    """Exchange reports over the default process group and raise on every rank unless all agree.

    Args:
        own: this rank's report.
        failure: the exception behind ``own.error``; raised again on this rank.
        changing: models are being changed already, so that a failure is not without consequences.

    Returns:
        The reports by global rank.

    Raises:
        ShardcoreError: ``failure`` itself, on the rank that failed.
        AgreementError: another rank failed, or the ranks differ; names the first difference and both sides.
    """
    reports = [own]
    if dist.is_initialized() and dist.get_world_size() > 1:
        gathered: list[Report | None] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, own)
        reports = [report for report in gathered if report is not None]
    if failure is not None:
        raise failure
    for rank, report in enumerate(reports):
        if report.error is not None:
            when = "while the models were being changed" if changing else "so no rank was changed"
            raise AgreementError(f"rank {rank} failed, {when}. Its error: {report.error}")
    for rank, report in enumerate(reports[1:], 1):
        if report.items != reports[0].items:
            raise AgreementError(_difference(reports[0], rank, report))
    return reports


def _difference(first: Report, rank: int, other: Report) -> str:
    frame = "ranks 0 and {rank} differ in {what}: {left} on rank 0, {right} on rank {rank}. Nothing was changed. {todo}"
    mine, theirs = dict(first.items), dict(other.items)
    for name in dict.fromkeys([*mine, *theirs]):
        left, right = mine.get(name, "absent"), theirs.get(name, "absent")
        if left != right:
            todo = (
                "Build the same model from the same weights on every rank (the same seed, or the same checkpoint), or "
                "pass sync_from=0 to take the weights of rank 0."
                if name.startswith("tensor ")
                else "Start every rank from the same environment, with the same model and the same arguments."
            )
            return frame.format(rank=rank, what=name, left=left, right=right, todo=todo)
    return f"ranks 0 and {rank} report the same things in another order; nothing was changed."
