"""What becomes of the parameters of a plan, equal blocks together: the rows of drawings."""

from __future__ import annotations

from dataclasses import dataclass

from shardcore.plan import ShardPlan
from shardcore.plan.shard_plan import names_together
from shardcore_planner.memory import local_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Cutting:
    """What becomes of a parameter, or of those of equal blocks.

    Attributes:
        names: in one line.
        full: the shape of the whole.
        local: that of the first rank's part.
        how: in words.
    """

    names: str
    full: tuple[int, ...]
    local: tuple[int, ...]
    how: str


def cuttings(plan: ShardPlan) -> list[Cutting]:
    """Return what becomes of every parameter, in the order of the model."""
    ranks = plan.config.tensor_parallel_size or 1
    alike: dict[tuple[str, tuple[int, ...], tuple[int, ...], str], list[str]] = {}
    for parameter in plan.parameters:
        local = local_shape(parameter, ranks, 0)
        pattern = "".join("*" if part.isdigit() else f".{part}" for part in parameter.name.split("."))
        key = (pattern, parameter.shape, local, str(parameter.layout or "by user code"))
        alike.setdefault(key, []).append(parameter.name)
    return [
        Cutting(names=names_together(names), full=full, local=local, how=how)
        for (_, full, local, how), names in alike.items()
    ]


def shape_in_words(shape: tuple[int, ...]) -> str:
    """Return ``32 x 64``."""
    return " x ".join(map(str, shape)) or "one number"
