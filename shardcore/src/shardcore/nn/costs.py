"""The collectives of one training step, as the modules that issue them describe them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal, Protocol

from shardcore.nn.layout import Layout


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a step without recomputation.

    Attributes:
        phase: in the forward or in the backward.
        where: the module that issues it.
        operation: what is done.
        payload: what is sent, in the notation of the docs.
    """

    phase: Literal["forward", "backward"]
    where: str
    operation: Literal["all_gather", "all_reduce", "all_to_all", "reduce_scatter"]
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


forward, backward = functools.partial(Collective, "forward"), functools.partial(Collective, "backward")
