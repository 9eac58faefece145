"""Checkpoints of pipelines: which rank speaks for the tensors that other ranks do not have."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from shardcore.checkpoint.ranks import Item, Ranks
from shardcore.errors import AgreementError
from shardcore.mesh import context_of, division_of

__all__ = ["Stages"]


class Held(Protocol):
    """The state of one rank."""

    @property
    def tensors(self) -> Any:
        """Its tensors by name."""

    def items_of_tensors(self) -> Iterable[Item]:
        """Yield what ranks that have the same tensors have alike."""


@dataclass(slots=True, kw_only=True)
class Stages:
    """The ranks of one model by what they have of it: all of it, or their stages of a pipeline.

    Attributes:
        ranks: all ranks.
        position: of this one in the pipeline; None without one.
        first: the first rank that has the tensors of this one.
        elsewhere: names of tensors that an earlier rank of the pipeline has too, and speaks for.
    """

    ranks: Ranks
    position: int | None
    first: int
    elsewhere: frozenset[str] = frozenset()

    @classmethod
    def of(cls, model: nn.Module, ranks: Ranks) -> Stages:
        """Return those of ``model``."""
        division, context = division_of(model), context_of(model)
        if division is None or context is None:
            return cls(ranks=ranks, position=None, first=ranks.ranks[0])
        names = context.mesh.mesh_dim_names or ()
        beside = context.mesh.mesh.select(names.index("pp"), division.position)
        return cls(ranks=ranks, position=division.position, first=int(beside.flatten()[0]))

    @property
    def tells(self) -> bool:
        """Whether this rank tells what is to be known of the tensors that it has."""
        return self.ranks.own == self.first

    def check(self, held: Held) -> None:
        """Find out what other ranks have. To be called on all of them.

        Raises:
            AgreementError: ranks that have the same stages differ.
        """
        if self.position is None:
            return
        items = tuple(held.items_of_tensors())
        digest = hashlib.sha256(repr(items).encode()).hexdigest()
        told = self.ranks.shared((self.position, digest, tuple(held.tensors)))
        first: dict[int, tuple[int, str]] = {}
        for rank, (position, other, _) in zip(self.ranks.ranks, told, strict=True):
            known, expected = first.setdefault(position, (rank, other))
            if other != expected:
                raise AgreementError(
                    f"ranks {known} and {rank} differ in the tensors of their stage, or in the state of the optimizer. "
                    "Nothing was written; call save_checkpoint on the same model with the same arguments."
                )
        earlier = (names for position, _, names in told if position < self.position)
        self.elsewhere = frozenset(name for names in earlier for name in names)

    def merged(self, indices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return what is written once for all ranks, of what each of them would write."""
        whole = dict(indices[0])
        if self.position is None:
            return whole
        whole["modules"] = {name: value for index in indices for name, value in (index["modules"] or {}).items()}
        if whole["optimizer"] is not None:
            groups = [dict(group, parameters={}) for group in whole["optimizer"]["groups"]]
            for index in indices:
                for group, own in zip(groups, index["optimizer"]["groups"], strict=True):
                    group["parameters"] |= own["parameters"]
            whole["optimizer"] = {**whole["optimizer"], "groups": groups}
        return whole
