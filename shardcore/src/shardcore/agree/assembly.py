"""All ranks of a model in one call, which is told in seconds if some of them cannot come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardcore.agree.meeting import Meeting
from shardcore.agree.presence import before_meeting
from shardcore.mesh import ShardContext

__all__ = ["assemble"]


def assemble(context: ShardContext, call: str, report: Mapping[str, Any] | None = None) -> Meeting:
    """Wait until all ranks of the mesh are in the same ``call``, before anything is sent there.

    Args:
        context: of the model.
        call: its name, for people.
        report: what this rank brings, for the others; see `Meeting.reports`.

    Raises:
        MissingRanksError: some do not come.
    """
    ranks = tuple(int(rank) for rank in context.mesh.mesh.flatten())
    return Meeting.hold(ranks, report or {}, call, watch=before_meeting(context))
