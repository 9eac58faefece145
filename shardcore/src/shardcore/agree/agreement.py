"""Agreement between ranks before a model is changed: one collective, one error on all ranks.

Every rank contributes either its error or a digest of what it holds (`shardcore.agree.fingerprint`).
If anything differs, or any rank failed, all ranks raise, and nothing was changed anywhere. Only ranks that differ send
each other everything, to name the first difference.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardcore.errors import AgreementError, ShardcoreError
from shardcore.mesh.axes import device_type_of

_SAME = "Start every rank from the same environment, with the same model and the same arguments."
_SAME_MODEL = "Build the same model on every rank."

# Start of an item's name -> the next step if ranks differ in it; `_SAME` for all others.
_TODO = {
    "ShardConfig.": _SAME,
    "the class of ": _SAME_MODEL,
    "the shape of ": _SAME_MODEL,
    "the dtype of ": f"{_SAME_MODEL} Casts have to be the same on every rank too.",
    "requires_grad of ": "Freeze the same parameters on every rank.",
    "the training mode": "Call model.train() or model.eval() alike on every rank, or pass sync_from=0 to take the "
    "weights and the mode of rank 0.",
    "the values of ": "Build the same model from the same weights on every rank (the same seed, or the same "
    "checkpoint), or pass sync_from=0 to take the weights of rank 0.",
    "the version of ": "Install the same version on every rank.",
    "the policy's origin": "Install the same packs in the same versions on every rank, and start all ranks with the "
    "same SHARDCORE_PACKS and SHARDCORE_DISABLE_PACKS.",
    "the packs ": "Install the same packs in the same versions on every rank, or leave them out with "
    "SHARDCORE_DISABLE_PACKS.",
    "the plain parameter ": "One rank's is saved for all. A module of your own that keeps this rank's part has to hold "
    "it as a DTensor (DTensor.from_local); replicas that have drifted need one set of weights.",
    "step ": f"{_SAME} A policy must not go by the order of a set, which differs with PYTHONHASHSEED.",
}

# For names without a space, which are those of attributes.
_ATTRIBUTE = "Give it the same value on every rank, or set it after shard() if ranks may differ in it."

# Values are shown up to this length.
_SHOWN = 200

_ROOM = 2048  # bytes for one report in the first collective: those of ranks that agree take less
_LENGTH = 8  # bytes for the length of a report


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one rank brings to the agreement."""

    error: str | None = None
    #: (name, value) pairs that must be equal on all ranks, ordered so that the first difference explains the others.
    items: tuple[tuple[str, str], ...] = ()
    seed: int = 0  # the rank's own random seed; the group takes the first rank's
    digest: str = ""  # stands for ``items`` where they were left out

    def brief(self) -> Report:
        """Return what is sent as long as ranks agree: the first two items, and a digest of all."""
        digest = hashlib.sha256(repr(self.items).encode()).hexdigest()
        return replace(self, items=self.items[:2], digest=digest)


def is_alone(group: ProcessGroup | None = None) -> bool:
    """Tell whether there is no other rank in ``group`` (the default process group) to agree with.

    The other ranks of torch's backend ``"fake"`` are simulated: nobody is there who could hold anything else.
    """
    return not dist.is_initialized() or dist.get_world_size(group) == 1 or dist.get_backend(group) == "fake"


@dataclass
class Agreement:
    """What a rank brings to an `agreement`, and what all of them brought when it is over."""

    report: Report = Report()
    reports: Sequence[Report] = ()


@contextmanager
def agreement(*, changing: bool = False, group: ProcessGroup | None = None) -> Iterator[Agreement]:
    """Do something that sends nothing on every rank of ``group``, and raise on all of them as `agree` does."""
    made, failure = Agreement(), None
    try:
        yield made
    except BaseException as error:  # what ends this process too: the other ranks wait for a report
        failure = error
    made.reports = agree(made.report, failure, changing=changing, group=group)


def agree(
    own: Report = Report(),  # immutable
    failure: BaseException | None = None,
    *,
    changing: bool = False,
    group: ProcessGroup | None = None,
) -> Sequence[Report]:
    """Exchange reports over a process group and raise on every rank of it unless all agree.

    Args:
        own: this rank's report, if it has not failed.
        failure: what this rank failed with; raised again on this rank.
        changing: models are being changed already, so that a failure is not without consequences.
        group: the ranks; the default process group if not given.

    Returns:
        The reports in the order of the group, each in brief.

    Raises:
        ShardcoreError: ``failure`` itself, on the rank that failed.
        AgreementError: another rank failed, or the ranks differ; names the first difference and both sides.
    """
    if failure is not None:
        own = Report(error=f"{type(failure).__name__}: {failure}")
    alone = is_alone(group)
    reports = [own] if alone else _gathered(own.brief(), group)
    names = [0] if alone else dist.get_process_group_ranks(group)
    other = _of_another_rank(names, reports)
    if failure is not None:
        if other:
            failure.add_note(other)
        if isinstance(failure, ShardcoreError) and not alone:
            failure.told_by = names[[report.error for report in reports].index(own.error)]
        raise failure
    for rank, report in zip(names, reports, strict=True):
        if report.error is not None:
            when = "while the models were being changed" if changing else "so no rank was changed"
            raise _told_by(rank, f"rank {rank} failed, {when}. Its error: {report.error}" + (other and f"\n{other}"))
    if any(report.digest != reports[0].digest for report in reports):
        # Seen by all ranks alike, so all of them come here.
        first, *others = _gathered(own, group)
        rank, report = next(pair for pair in zip(names[1:], others, strict=True) if pair[1].items != first.items)
        raise _told_by(names[0], _difference(names[0], first, rank, report))
    return reports


def _told_by(rank: int, text: str) -> AgreementError:
    error = AgreementError(text)
    error.told_by = rank
    return error


def _gathered(own: Report, group: ProcessGroup | None) -> list[Report]:
    """Return the reports of all ranks, in the order of the group.

    One collective, or two if a report does not fit into the room that each has in the first one.
    """
    told = pickle.dumps(own)
    messages = _exchanged(told, _ROOM, group)
    longest = max(length for length, _ in messages)
    if longest > _ROOM:  # seen by all ranks alike
        messages = _exchanged(told, longest, group)
    return [pickle.loads(message[:length]) for length, message in messages]


def _exchanged(told: bytes, room: int, group: ProcessGroup | None) -> list[tuple[int, bytes]]:
    """Return of every rank how long its message is, and as much of it as there is ``room`` for."""
    data = bytearray(len(told).to_bytes(_LENGTH, "big") + told[:room].ljust(room, b"\0"))
    own = torch.frombuffer(data, dtype=torch.uint8).to(device_type_of(group))
    everybody = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everybody, own, group=group)
    received = [bytes(message.cpu().numpy()) for message in everybody]
    return [(int.from_bytes(message[:_LENGTH], "big"), message[_LENGTH:]) for message in received]


def _of_another_rank(names: Sequence[int], reports: Sequence[Report]) -> str:
    """Say what the first rank holds that did not fail, if it says anything."""
    for rank, report in zip(names, reports, strict=True):
        if report.error is None and report.items:
            there = "; ".join(f"{name} there: {value}" for name, value in report.items[:2])
            return f"rank {rank} did not fail; {there}"
    return ""


def _difference(one: int, first: Report, rank: int, other: Report) -> str:
    frame = (
        f"ranks {one} and {rank} differ in {{what}}: {{left}} on rank {one}, {{right}} on rank {rank}. Nothing was "
        "changed. {todo}"
    )
    mine, theirs = dict(first.items), dict(other.items)
    for name in dict.fromkeys([*mine, *theirs]):
        left, right = mine.get(name, "nothing"), theirs.get(name, "nothing")
        if left != right:
            other_todo = _SAME if " " in name else _ATTRIBUTE
            todo = next((todo for start, todo in _TODO.items() if name.startswith(start)), other_todo)
            return frame.format(what=name, left=_shown(left), right=_shown(right), todo=todo)
    return f"ranks {one} and {rank} report the same things in another order; nothing was changed."


def _shown(value: str) -> str:
    return value if len(value) <= _SHOWN else f"{value[:_SHOWN]}..."
