"""Agreement between ranks before a model is changed: one collective, one error on all ranks.

Every rank contributes either its error or a digest of what it holds (plan, configuration, a checksum of every tensor).
If anything differs, or any rank failed, all ranks raise, and nothing was changed anywhere. Only ranks that differ send
each other everything, to name the first difference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardcore.errors import AgreementError
from shardcore.plan import ShardPlan
from shardcore.steps import Step, Swap, to_data

__all__ = ["Report", "agree", "checksums", "in_words"]

_SAME = "Start every rank from the same environment, with the same model and the same arguments."

# Start of an item's name -> the next step if ranks differ in it; `_SAME` for all others.
_TODO = {
    "tensor ": "Build the same model from the same weights on every rank (the same seed, or the same checkpoint), or "
    "pass sync_from=0 to take the weights of rank 0.",
    "the policy's origin": "Install the same packs in the same versions on every rank, and start all ranks with the "
    "same SHARDCORE_PACKS and SHARDCORE_DISABLE_PACKS.",
    "the packs ": "Install the same packs in the same versions on every rank, or leave them out with "
    "SHARDCORE_DISABLE_PACKS.",
    "step ": f"{_SAME} A policy must not go by the order of a set, which differs with PYTHONHASHSEED.",
}

# Words are summed in squares of this side, row by row and column by column.
_SIDE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one rank brings to the agreement.

    Attributes:
        error: the rank's error as text; None if it has none.
        items: (name, value) pairs that must be equal on all ranks, the most telling first.
        seed: the rank's own random seed; the group takes the first rank's.
        digest: stands for ``items`` where they were left out.
    """

    error: str | None = None
    items: tuple[tuple[str, str], ...] = ()
    seed: int = 0
    digest: str = ""

    @classmethod
    def of_error(cls, error: BaseException) -> Report:
        """Return the report of a rank that failed."""
        return cls(error=f"{type(error).__name__}: {error}")

    def brief(self) -> Report:
        """Return what is sent as long as ranks agree: the first item, and a digest of all."""
        digest = hashlib.sha256(repr(self.items).encode()).hexdigest()
        return replace(self, items=self.items[:1], digest=digest)


def checksums(model: nn.Module, *, values: bool = True) -> list[tuple[str, str]]:
    """Return (name, what must agree) for every parameter and buffer of ``model``, in its order.

    That is the shape, the dtype, whether it is on the meta device or frozen and, with ``values``, a checksum.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [(f"{name} {tuple(t.shape)} {t.dtype}", _state(t, values)) for name, t in tensors]


def in_words(plan: ShardPlan) -> list[tuple[str, str]]:
    """Return (name, words) for every part of a plan, so that ranks with different plans see where they part.

    The words are the same in every process. The digest comes last: it covers what words leave out.
    """
    steps = [(f"step {number} of the plan", _step(step)) for number, step in enumerate(plan.steps, 1)]
    layouts = [(f"the layout of {p.name} in the plan", f"{p.layout or 'left to a function'}") for p in plan.parameters]
    return [("the model's class", plan.model), *steps, *layouts, ("the plan", plan.digest)]


def _step(step: Step) -> str:
    if not isinstance(step, Swap):
        return f"{step.path or 'the model'} {Step.describe(step)}"
    options = ", ".join(f"{name}={to_data(value)}" for name, value in step.options)
    return f"{step.path or 'the model'} becomes {to_data(step.target)}({options})"


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


def agree(
    own: Report,
    failure: BaseException | None = None,
    *,
    changing: bool = False,
    group: ProcessGroup | None = None,
) -> Sequence[Report]:
    """Exchange reports over a process group and raise on every rank of it unless all agree.

    Args:
        own: this rank's report.
        failure: the exception behind ``own.error``; raised again on this rank.
        changing: models are being changed already, so that a failure is not without consequences.
        group: the ranks; the default process group if not given.

    Returns:
        The reports in the order of the group, each in brief.

    Raises:
        ShardcoreError: ``failure`` itself, on the rank that failed.
        AgreementError: another rank failed, or the ranks differ; names the first difference and both sides.
    """
    alone = not dist.is_initialized() or dist.get_world_size(group) == 1
    reports = [own] if alone else _gathered(own.brief(), group)
    names = [0] if alone else dist.get_process_group_ranks(group)
    other = _of_another_rank(names, reports)
    if failure is not None:
        if other:
            failure.add_note(other)
        raise failure
    for rank, report in zip(names, reports, strict=True):
        if report.error is not None:
            when = "while the models were being changed" if changing else "so no rank was changed"
            raise AgreementError(f"rank {rank} failed, {when}. Its error: {report.error}" + (other and f"\n{other}"))
    if any(report.digest != reports[0].digest for report in reports):
        # Seen by all ranks alike, so all of them come here.
        first, *others = _gathered(own, group)
        rank, report = next(pair for pair in zip(names[1:], others, strict=True) if pair[1].items != first.items)
        raise AgreementError(_difference(names[0], first, rank, report))
    return reports


def _gathered(own: Report, group: ProcessGroup | None) -> list[Report]:
    """Return the reports of all ranks, in the order of the group."""
    gathered: list[Report | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, own, group=group)
    return [report for report in gathered if report is not None]


def _of_another_rank(names: Sequence[int], reports: Sequence[Report]) -> str:
    """Say what the first rank holds that did not fail, if it says anything."""
    for rank, report in zip(names, reports, strict=True):
        if report.error is None and report.items:
            name, value = report.items[0]
            return f"rank {rank} did not fail; {name} there: {value}"
    return ""


def _difference(one: int, first: Report, rank: int, other: Report) -> str:
    frame = (
        f"ranks {one} and {rank} differ in {{what}}: {{left}} on rank {one}, {{right}} on rank {rank}. Nothing was "
        "changed. {todo}"
    )
    mine, theirs = dict(first.items), dict(other.items)
    for name in dict.fromkeys([*mine, *theirs]):
        left, right = mine.get(name, "absent"), theirs.get(name, "absent")
        if left != right:
            todo = next((todo for start, todo in _TODO.items() if name.startswith(start)), _SAME)
            return frame.format(what=name, left=left, right=right, todo=todo)
    return f"ranks {one} and {rank} report the same things in another order; nothing was changed."
