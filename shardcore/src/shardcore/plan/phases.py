"""What `shardcore.shard` does to a model, one phase after the other; `shardcore.api` has their order.

```
        begin    check    items   |  all ranks agree  |   shard   |  apply
phase   all      all      all     |                   |   (first) |  one after the other, each on all ranks
```

Nothing is changed before the ranks agree, but what `begin` does, and `give_up` undoes that on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardcore.mesh import ShardContext
from shardcore.plan.shard_plan import ShardPlan

__all__ = ["ModelPhase"]


class ModelPhase:
    """One thing that is done to a model after its layers were sharded. Whether it runs follows from the plan alone."""

    def begin(self) -> None:
        """Make the model ready to be compiled."""

    def give_up(self) -> None:
        """Undo `begin`: nothing was sharded."""

    def check(self, plan: ShardPlan) -> None:
        """Refuse what would fail after the model was changed; an error becomes one on all ranks."""

    def items(self) -> Iterator[tuple[str, str]]:
        """Yield (name, value) of what has to be the same on every rank."""
        yield from ()

    def runs(self, context: ShardContext | None) -> bool:
        """Tell whether there is something to do, alike on all ranks; ``context`` is None where nothing was sharded."""
        return context is not None

    def apply(self, context: ShardContext | None, plan: ShardPlan) -> None:
        """Change the model; what fails on one rank is an error on all, and leaves the model unusable."""
        raise NotImplementedError
