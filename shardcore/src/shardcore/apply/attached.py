"""What a foreign library has put around the layers of a model: taken off while the model is sharded, put back after.

A policy names the modules of the class that it serves. A library that wraps some of them (adapters) has a room in
`shardcore.integrations`, a package of its name with a module ``attaching``, which is found by the classes of the
model's modules; nothing here knows one of them.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Protocol, cast

from torch import nn

from shardcore.agree.fingerprint import Item
from shardcore.mesh import ShardContext
from shardcore.nn.process import Change
from shardcore.plan import ShardPlan

__all__ = ["Attached", "attached_to", "changes_of_libraries"]

_ROOMS = "shardcore.integrations"


class Attached(Protocol):
    """What is attached to one model, between the call of `shard` and its end.

    Attributes:
        model: what is sharded: the model without what is attached.
    """

    model: nn.Module

    def check(self, plan: ShardPlan) -> None:
        """Refuse what is known to have no sharded form, before anything is changed."""

    def items(self, *, values: bool) -> Iterator[Item]:
        """Yield what has to be the same on every rank; with ``values``, those of parameters too."""

    def take_off(self) -> None:
        """Leave the native modules alone in the model."""

    def put_back(self) -> None:
        """Undo `take_off`: the model was not sharded."""

    def attach(self, context: ShardContext, receive: Callable[[nn.Module], None] | None) -> None:
        """Put back what was taken off, on the sharded model; ``receive`` gives a module the values of one rank.

        Raises:
            NotSupportedError: something cannot be attached where it was.
        """


def attached_to(model: nn.Module) -> Attached | None:
    """Return what a library that has a room here has attached to ``model``, or None.

    Raises:
        NotSupportedError: it is nothing that can be sharded.
    """
    for library in dict.fromkeys(type(module).__module__.partition(".")[0] for module in model.modules()):
        room = f"{_ROOMS}.{library}"
        spec = importlib.util.find_spec(room)
        if spec is None or spec.submodule_search_locations is None:
            continue
        found = importlib.import_module(f"{room}.attaching").attached_to(model)
        if found is not None:
            return cast("Attached", found)
    return None


def changes_of_libraries() -> tuple[Change, ...]:
    """Return what is changed in libraries that have a room here as long as a sharded model lives."""
    return cast("tuple[Change, ...]", importlib.import_module(f"{_ROOMS}.holders").HOLDERS_SAVE)
