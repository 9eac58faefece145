"""The word for sequence parallelism."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from shardcore.plan.steps.tokens import DivideTokens, ShardSequence
from shardcore.policy import HeadCounts, Rule, Scope, Word
from shardcore.styles._finding import argument_of, heads_of, names_of, written


def sequence(
    *,
    scatter: str,
    gather: str,
    stack: str = "",
    attention: tuple[str, ...] | str = (),
    cross_attention: str = "",
    heads: str | None = None,
    optional: bool = False,
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
        cross_attention: the module of a block through which tokens see the states of another stack, if there is one.
        heads: the attribute that counts the heads, where not all stacks of the model have equally many.
        optional: the modules may be absent.
    """

    def plan(scope: Scope) -> None:
        owner, _ = _list_and_index(scatter)
        start, end = (_from_the_front(scope, name) for name in (scatter, gather))
        blocks, first, last = scope.find(owner), scope.find(start), scope.find(end)
        if blocks is None or first is None or last is None:
            return
        if not owner or not isinstance(blocks, nn.ModuleList | nn.Sequential):
            what = f"{scatter!r} names no block of a list, but a child of a {type(blocks).__name__}"
            scope.problem(what, "name the first block: scatter='layers[0]'", start)
            return
        argument = argument_of(first, None)
        if stack and scope.find(stack) is None:
            return
        if argument is None:
            scope.problem(f"{type(first).__name__}.forward names no argument", "name another block", start)
            return
        children = [f"{owner}.{child}" for child, _ in blocks.named_children()]
        where: dict[str, Any] = {
            "path": scope.name(stack),
            "blocks": tuple(map(scope.name, children)),
            "argument": argument,
            "end": scope.name(end),
        }
        if (scope.config.context_parallel_size or 1) > 1 and attention:
            inside = [f"{child}.{name}" for child in children for name in names_of(attention)]
            across = [f"{child}.{cross_attention}" for child in children if cross_attention]
            # Each that is missing is a problem of the plan.
            if None not in [scope.find(name) for name in (*inside, *across)]:
                named = {"attentions": tuple(map(scope.name, inside)), "across": tuple(map(scope.name, across))}
                _divide(scope, where | named, heads_of(scope, heads))
        if scope.config.enable_sequence_parallelism:
            scope.add(ShardSequence(**where))

    named = {"attention": names_of(attention) or None, "cross_attention": cross_attention or None, "heads": heads}
    text = written("sequence", scatter=scatter, gather=gather, stack=stack, **named)
    return Word(text=text, optional=optional, planned=plan)


def _divide(scope: Scope, where: dict[str, Any], heads: HeadCounts | None) -> None:
    """Divide the tokens over the ranks of ``cp``, ``where`` those of ``tp`` would split them."""
    config = scope.config
    ranks = config.context_parallel_size or 1
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
            **where,
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
