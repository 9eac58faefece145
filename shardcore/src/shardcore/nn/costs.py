"""The collectives of one training step, as the modules that issue them describe them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from shardcore.nn.layout import Layout

Pass = Literal["forward", "backward"]
Operation = Literal["all_gather", "all_reduce", "all_to_all", "reduce_scatter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective of a step without recomputation.

    Attributes:
        where: the module that issues it.
        phase: in the forward or in the backward.
        operation: what is done.
        payload: what is sent, in the notation of the docs.
    """

    where: str
    phase: Pass
    operation: Operation
    payload: str


class Site(Protocol):
    """A module's place in a plan: the facts of the plan that decide which collectives the module issues."""

    #: Its full name in the model.
    path: str
    #: Whether its activations are split along the sequence.
    split: bool
    #: Whether partial gradients of replicated parameters are summed in the backward, or later in one bucket.
    sums_at_once: bool
    #: Whether what regions gathered along the sequence is kept for the backward.
    keeps_gathered: bool
    #: Whether it is a head whose logits stay split over the vocabulary.
    splits_logits: bool

    def layout(self, parameter: str) -> Layout | None:
        """Return the layout of one of its own parameters; None if it has none of that name."""

    def member(self, path: str) -> Site:
        """Return the place of another module."""


def forward(where: str, operation: Operation, payload: str) -> Collective:
    """Return a collective of the forward."""
    return Collective(where=where, phase="forward", operation=operation, payload=payload)


def backward(where: str, operation: Operation, payload: str) -> Collective:
    """Return a collective of the backward."""
    return Collective(where=where, phase="backward", operation=operation, payload=payload)
