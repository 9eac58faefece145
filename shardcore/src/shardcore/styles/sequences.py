"""The word for sequence parallelism."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torch import nn
from typing_extensions import override

from shardcore.nn.arguments import Argument
from shardcore.plan.steps.tokens import DivideTokens, ShardSequence
from shardcore.policy import Rule, Scope
from shardcore.styles._finding import argument_of, written


def sequence(
    *, scatter: str, gather: str, stack: str = "", attention: tuple[str, ...] | str = (), optional: bool = False
) -> Rule:
    """Split activations along the sequence between modules of a stack of blocks.

    Under ``enable_sequence_parallelism`` each rank has its part of the tokens from ``scatter`` to ``gather``, outside
    regions, and all tokens elsewhere. The norms and biases in between then have partial gradients; the plan finds them.
    List the rule under the module whose ``forward`` runs the blocks, or that calls ``stack``.

    Args:
        scatter: the first block of a list (``"layers[0]"``), whose input is split.
        gather: the module whose output is gathered: the last norm, or where there is none the last block
            (``"layer[-1]"``).
        stack: the module whose ``forward`` runs the blocks, if the rule is listed under the one that calls it.
        attention: the modules of a block through which tokens see each other, by the attention of their library. All
            else in a block has to treat each token by itself. Under ``context_parallel_size`` tokens are then divided
            over the ranks of ``cp``; without it that is refused.
        optional: the modules may be absent.
    """
    named: dict[str, Any] = {"scatter": scatter, "gather": gather, "stack": stack}
    if attention:
        named["attention"] = (attention,) if isinstance(attention, str) else attention
    return SequenceRule(text=written("sequence", **named), optional=optional, **named)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRule(Rule):
    """`shardcore.styles.sequence`."""

    scatter: str
    gather: str
    stack: str = ""
    attention: tuple[str, ...] = ()

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
            return
        names = tuple(scope.name(f"{owner}.{child}") for child, _ in blocks.named_children())
        if (scope.config.context_parallel_size or 1) > 1 and self.attention:
            inside = [f"{owner}.{child}.{name}" for child, _ in blocks.named_children() for name in self.attention]
            missing = [name for name in inside if scope.find(name) is None]  # each of which is a problem of the plan
            if not missing:
                self._divide(scope, names, argument, scope.name(gather), [scope.name(name) for name in inside])
        if scope.config.enable_sequence_parallelism:
            scope.add(
                ShardSequence(
                    path=scope.name(self.stack),
                    blocks=names,
                    argument=argument,
                    end=scope.name(gather),
                )
            )

    def _divide(
        self, scope: Scope, blocks: tuple[str, ...], argument: Argument, end: str, attentions: list[str]
    ) -> None:
        config = scope.config
        ranks, heads = config.context_parallel_size or 1, scope.heads
        if heads is None:
            return
        most = heads.query // scope.ranks  # the least that a rank has
        exchanging = {
            "ring_attn": 1,
            "all_to_all": ranks,
            "auto": max(n for n in range(1, ranks + 1) if ranks % n == 0 and n <= max(1, most)),
        }[config.context_parallel_mode]
        if exchanging > most:
            what = f"{most} heads of a rank cannot be shared by context_parallel_size {ranks}: each needs one"
            scope.problem(what, "say context_parallel_mode='auto' or 'ring_attn', or take fewer ranks")
        scope.add(
            DivideTokens(
                path=scope.name(self.stack),
                blocks=blocks,
                argument=argument,
                end=end,
                attentions=tuple(attentions),
                exchanging=exchanging,
                rings=ranks // exchanging,
                keeps=config.parallel_output,
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
