"""What releases of torch do differently in public: names that were changed, and what an older release cannot do.

``shardcore doctor`` reports it, with what is lost; what follows from it is in `shardcore._torch`. What torch does not
promise to keep is in `shardcore._private`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shardcore._private import TESTED, find
from shardcore.errors import NotSupportedError

__all__ = [
    "ABILITIES",
    "ALL_GATHER",
    "CLIPPED_SUMS",
    "NAMES",
    "REDUCE_SCATTER",
    "SET_TIMEOUT",
    "STAGES",
    "TRACED_READS",
    "Ability",
    "Renamed",
]


@dataclass(frozen=True, slots=True)
class Ability:
    """Something that torch does rightly since a release that is not the first supported one.

    Attributes:
        what: what it is for users.
        since: the first release that can.
        lost: what is lost, or refused, without it, and what to do.
    """

    what: str
    since: str
    lost: str

    def is_there(self) -> bool:
        """Tell whether the installed torch can."""
        return _release(torch.__version__) >= _release(self.since)


@dataclass(frozen=True, slots=True)
class Renamed:
    """A public name that everything needs, and that is another one in other releases.

    Attributes:
        paths: the names, the newest first.
    """

    paths: tuple[str, ...]

    def is_there(self) -> bool:
        """Tell whether the installed torch has one of them."""
        return any(find(path) is not None for path in self.paths)

    def find(self) -> Any:
        """Return what the installed torch has under the newest of them.

        Raises:
            NotSupportedError: it has none.
        """
        found = next((value for path in self.paths if (value := find(path)) is not None), None)
        if found is None:
            raise NotSupportedError(self.complaint())
        return found

    def complaint(self) -> str:
        """Say that the installed torch has none of them, and what to do."""
        return (
            f"torch {torch.__version__} has neither {' nor '.join(self.paths)}, one of which everything needs. "
            f"shardcore was tested with torch {' to '.join(TESTED)}; install a release of that range"
        )


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


ALL_GATHER = Renamed(("torch.distributed.all_gather_single", "torch.distributed.all_gather_into_tensor"))
REDUCE_SCATTER = Renamed(("torch.distributed.reduce_scatter_single", "torch.distributed.reduce_scatter_tensor"))
SET_TIMEOUT = Renamed(("torch.distributed.set_timeout", "torch.distributed.distributed_c10d._set_pg_timeout"))
NAMES = (ALL_GATHER, REDUCE_SCATTER, SET_TIMEOUT)

# Traced by torch 2.11, `to_local` of a split parameter has a gradient that calls itself replicated.
TRACED_READS = Ability(
    "torch.compile in one graph",
    since="2.13",
    lost="graphs break wherever a sharded model reads its parameters, and fullgraph=True raises",
)

# To clip partial gradients torch multiplies them. 2.11 multiplies several of them at once (``_foreach_mul_``) by a part
# of the factor, so that they are hardly clipped.
CLIPPED_SUMS = Ability(
    "clipping of deferred gradients",
    since="2.13",
    lost="under partial_gradients='deferred' an optimizer refuses gradients that are not summed yet: call "
    "shardcore.reduce_partial_gradients(model) before clipping",
)

# Before, a stage of torch's pipelines has to return a gradient for whatever it was given, token ids too.
STAGES = Ability("pipelines", since="2.13", lost="pp= above 1 is refused: shard by tp= and dp= alone")

ABILITIES = (TRACED_READS, CLIPPED_SUMS, STAGES)
