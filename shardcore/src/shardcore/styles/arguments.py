"""The word for arguments that have all heads, of which a rank needs its own."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from shardcore.plan.steps import SliceArgument
from shardcore.policy import Rule, Scope
from shardcore.styles._finding import argument_of, heads_of
from shardcore.styles._text import written

__all__ = ["slice_arg"]


def slice_arg(
    module: str, name: str, dim: int, *, heads: str | None = None, partial: bool = False, optional: bool = False
) -> Rule:
    """Cut an argument that has all heads to the heads of the rank: ALiBi, a mask by heads, a bias of positions.

    Its gradient, if it needs one, is put together from all ranks.

    Args:
        module: the module whose ``forward`` takes the tensor (``""`` for the one that the rule is listed under).
        name: the argument of that ``forward``; where it is None, nothing is done.
        dim: the dim with the heads: as many as the model has, several times as many with the heads innermost (batch *
            heads), or 1 for a tensor that all heads share.
        heads: the attribute that counts the heads of this one module, in place of the policy's check. It is read when
            the plan is compiled, before an `attribute` rule changes it.
        partial: what makes the tensor sums its gradient itself, because it is `partial`: nothing is sent here.
        optional: the module may be absent.
    """
    text = written("slice_arg", module, name, dim, heads=heads, partial=partial or None)
    return SliceArgRule(
        text=text, optional=optional, module=module, name=name, dim=dim, heads=heads, partial_gradient=partial
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceArgRule(Rule):
    """`shardcore.styles.slice_arg`."""

    module: str
    name: str
    dim: int
    heads: str | None
    partial_gradient: bool

    @override
    def plan(self, scope: Scope) -> None:
        module = scope.find(self.module)
        if module is None:
            return
        argument = argument_of(module, self.name)
        if argument is None:
            scope.problem(f"{type(module).__name__}.forward has no argument {self.name!r}", "correct it", self.module)
        heads = heads_of(scope, self.heads)
        if argument is None or heads is None:
            return
        if (count := heads.query) % scope.ranks != 0:
            scope.problem(
                f"{count} heads ({self.heads or 'of the policy'}) cannot be split over {scope.ranks} ranks",
                f"use a tensor_parallel_size that divides {count}",
                self.module,
            )
            return
        scope.add(
            SliceArgument(
                path=scope.name(self.module),
                argument=argument,
                dim=self.dim,
                heads=count,
                partial=self.partial_gradient,
            )
        )
