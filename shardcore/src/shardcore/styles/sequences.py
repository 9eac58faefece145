"""The word for sequence parallelism."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torch import nn
from typing_extensions import override

from shardcore.plan.steps import ShardSequence
from shardcore.policy import Rule, Scope
from shardcore.styles._finding import argument_of
from shardcore.styles._text import written

__all__ = ["sequence"]


def sequence(*, scatter: str, gather: str, stack: str = "", optional: bool = False) -> Rule:
    """Split activations along the sequence between modules of a stack of blocks.

    Under ``enable_sequence_parallelism`` each rank has its part of the tokens from ``scatter`` to ``gather``, outside
    regions, and all tokens elsewhere. The norms and biases in between then have partial gradients; the plan finds them.
    List the rule under the module whose ``forward`` runs the blocks, or that calls ``stack``.

    Args:
        scatter: the first block of a list (``"layers[0]"``), whose input is split.
        gather: the module whose output is gathered: the last norm, or where there is none the last block
            (``"layer[-1]"``).
        stack: the module whose ``forward`` runs the blocks, if the rule is listed under the one that calls it.
        optional: the modules may be absent.
    """
    named: dict[str, Any] = {"scatter": scatter, "gather": gather, "stack": stack}
    return SequenceRule(text=written("sequence", **named), optional=optional, **named)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRule(Rule):
    """`shardcore.styles.sequence`."""

    scatter: str
    gather: str
    stack: str = ""

    @override
    def plan(self, scope: Scope) -> None:
        owner, _ = _list_and_index(self.scatter)
        scatter, gather = (_from_the_front(scope, name) for name in (self.scatter, self.gather))
        blocks, first, last = scope.find(owner), scope.find(scatter), scope.find(gather)
        if blocks is None or first is None or last is None:
            return
        if not owner or not isinstance(blocks, nn.ModuleList | nn.Sequential):
            what = f"{self.scatter!r} names no block of a list, but a child of a {type(blocks).__name__}"
            scope.problem(what, "name the first block: scatter='layers[0]'", scatter)
            return
        argument = argument_of(first, None)
        if self.stack and scope.find(self.stack) is None:
            return
        if argument is None:
            scope.problem(f"{type(first).__name__}.forward names no argument", "name another block", scatter)
        elif scope.config.enable_sequence_parallelism:
            names = tuple(scope.name(f"{owner}.{child}") for child, _ in blocks.named_children())
            scope.add(
                ShardSequence(
                    path=scope.name(self.stack),
                    blocks=names,
                    argument=argument,
                    end=scope.name(gather),
                )
            )


def _list_and_index(name: str) -> tuple[str, int | None]:
    """Return ``layers`` and 0 of ``layers[0]`` or ``layers.0``."""
    found = re.fullmatch(r"(.+?)(?:\[(-?\d+)\]|\.(\d+))", name)
    return (found[1], int(found[2] or found[3])) if found else ("", None)


def _from_the_front(scope: Scope, name: str) -> str:
    """Return ``layer[-1]`` as ``layer[11]``."""
    owner, index = _list_and_index(name)
    if index is None or index >= 0:
        return name
    blocks = scope.find(owner)
    return f"{owner}[{len(blocks) + index}]" if isinstance(blocks, nn.ModuleList | nn.Sequential) else name
