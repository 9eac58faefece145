"""Steps by which a tensor arrives in regions by another way than the input of a block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from shardcore.nn.arguments import SlicedArgument
from shardcore.plan.steps.base import ApplyContext, Commit, Phase, Step

__all__ = ["SliceArgument"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceArgument(Step):
    """An argument of the module ``path`` is cut to the heads of the rank.

    What its gradient costs is not counted: a plan cannot know whether it needs one, and masks and slopes do not.

    Attributes:
        argument: name and position of the argument.
        dim: its dim with heads.
        heads: how many there are on all ranks together.
        partial: what makes the argument sums its own gradient.
    """

    # Before the entry of a region at the same module looks at its arguments.
    phase: ClassVar[Phase] = Phase.CHANGE

    argument: tuple[str, int]
    dim: int
    heads: int
    partial: bool = False

    @override
    def describe(self) -> str:
        summed = ", its gradient summed by what makes it" if self.partial else ""
        return f"cuts {self.argument[0]!r} on dim {self.dim} to this rank's part of {self.heads} heads{summed}"

    @override
    def conflict(self, other: Step) -> str | None:
        if isinstance(other, SliceArgument) and other.argument == self.argument:
            return f"the argument {self.argument[0]!r} of {self.path} would be cut twice"
        return None

    @override
    def prepare(self, ctx: ApplyContext) -> Commit:
        module = ctx.model.get_submodule(self.path)
        hook = SlicedArgument(ctx.shared, self.argument, self.dim, self.heads, partial=self.partial)

        def commit() -> None:
            module.register_forward_pre_hook(hook, with_kwargs=True)

        return commit
