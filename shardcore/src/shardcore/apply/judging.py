"""Where the ranks of a model tell each other what they have found in its graph."""

from __future__ import annotations

import functools

from torch import nn

from shardcore.agree.agreement import is_alone
from shardcore.agree.meeting import Meeting
from shardcore.errors import MissingRanksError
from shardcore.mesh import ShardContext
from shardcore.nn.judged import judge

__all__ = ["judge_calls"]


def judge_calls(model: nn.Module, context: ShardContext) -> None:
    """Let ``model`` judge the first call of each kind, on all ranks of its ``tp`` together.

    They meet in the store: what is sent in a call stays what the plan says.
    """
    ranks = () if is_alone(context.group) else tuple(int(rank) for rank in context.tp.mesh.flatten())
    judge(model, functools.partial(_told, ranks))


def _told(ranks: tuple[int, ...], found: str) -> str:
    """Tell the other ranks what this one has ``found``, and return what the first of them has."""
    if not ranks:
        return ""
    try:
        meeting = Meeting.hold(ranks, {"found": found}, "forward")
    except MissingRanksError as error:
        names = ", ".join(map(str, error.missing)) or "another one"
        raise MissingRanksError(
            "the ranks of a sharded model meet at the end of the first forward of each kind (the same arguments, the "
            f"same training mode), and these did not come: {names}. Look for an error on them, and call the model "
            "alike on every rank.",
            error.missing,
        ) from error
    return next((f"rank {rank}: {said['found']}" for rank, said in meeting.reports.items() if said["found"]), "")
