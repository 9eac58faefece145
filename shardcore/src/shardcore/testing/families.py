"""Which cases go through everything where families share: the first of each family of models.

Models of one class of configuration have their blocks from the same classes, and one policy's words for them. With
``--families`` the numbers of every case are compared, and once what depends on those blocks alone (dropout,
recomputation, the cost of a block, replicas, checkpoints). ``--quick`` leaves that to the first case of the pack.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardcore.testing.cases import Case

__all__ = ["stand_for_families"]


def stand_for_families(cases: Sequence[Case]) -> set[str]:
    """Return the names of the cases that stand for their families: the first of each.

    Args:
        cases: the cases of a pack. A model without a configuration is of the family of its class; one that cannot be
            built stands for itself, so that its tests say why.
    """
    first: dict[object, str] = {}
    for case in cases:
        first.setdefault(_family(case), case.name)
    return set(first.values())


def _family(case: Case) -> object:
    try:
        model = case.build()
    except Exception:
        return case.name
    config = getattr(model, "config", None)
    return type(model) if config is None else type(config)
