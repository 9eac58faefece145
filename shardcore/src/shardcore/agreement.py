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

# Elements that one partial sum covers: small enough to tell where values stand, large enough to be fast.
_CHUNK = 1 << 16


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


def checksums(model: nn.Module) -> list[tuple[str, str]]:
    """Return (name, checksum) for every parameter and buffer of ``model``, in its order.

    Meta tensors count by shape and dtype only.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [(f"{name} {tuple(t.shape)} {t.dtype}", _checksum(t)) for name, t in tensors]


def _checksum(tensor: Tensor) -> str:
    if tensor.device.type == "meta" or tensor.numel() == 0:
        return "meta"
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    aligned = raw.numel() % 4 == 0 and raw.storage_offset() % 4 == 0
    words = raw.view(torch.int32) if aligned else raw
    whole = words.numel() // _CHUNK * _CHUNK
    sums = [words[:whole].view(-1, _CHUNK).sum(1, dtype=torch.int64), words[whole:].sum(dtype=torch.int64).view(1)]
    return hashlib.sha256(torch.cat(sums).cpu().numpy().tobytes()).hexdigest()[:16]


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
