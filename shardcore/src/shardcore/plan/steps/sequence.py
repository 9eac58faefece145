"""The step that splits activations along the sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from shardcore.errors import Problem
from shardcore.nn.base import ParallelMixin
from shardcore.nn.costs import Collective, Site, backward, forward
from shardcore.nn.sequence.tokens import SequenceBlock, SequenceEnd, SequenceStack
from shardcore.plan.steps.base import ApplyContext, Commit, Phase, PlanView, Step

__all__ = ["ShardSequence"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSequence(Step):
    """Activations between the blocks of the module ``path`` are split along the sequence.

    Attributes:
        blocks: its blocks; the first one that is called splits them.
        argument: name and position of the argument of a block with these activations.
        end: the module whose output is gathered.
    """

    phase: ClassVar[Phase] = Phase.SEQUENCE

    blocks: tuple[str, ...]
    argument: tuple[str, int]
    end: str

    @property
    @override
    def splits_tokens(self) -> tuple[str, ...]:
        return (*self.blocks, self.end)

    @property
    @override
    def mixins(self) -> tuple[tuple[str, type[ParallelMixin]], ...]:
        blocks = ((block, SequenceBlock) for block in self.blocks)
        return ((self.path, SequenceStack), *blocks, (self.end, SequenceEnd))

    @override
    def describe(self) -> str:
        return f"tokens of {self.argument[0]!r} split from {self.blocks[0]} to {self.end}"

    @override
    def check(self, plan: PlanView) -> Iterator[Problem]:
        below = {id(m): m for place in self.splits_tokens for m in plan.model.get_submodule(place).modules()}
        for module in below.values():
            for step in plan.at_module(module):
                if not self.splits_tokens_of(step.path):
                    yield step.problem(
                        "under sequence parallelism it would see a part of the tokens in the blocks, and all of them "
                        f"as {step.path}, which is the same module",
                        "give the blocks a module of their own, or turn sequence parallelism off",
                    )
                elif what := step.on_split_tokens():
                    yield step.problem(
                        f"under sequence parallelism {what}",
                        "declare a region(enter=...) whose entry is the module that reads them, or turn it off",
                    )

    @override
    def collectives(self, site: Site) -> Iterator[Collective]:
        yield forward(self.end, "all_gather", "(B, S/tp, H) output")
        yield backward(self.blocks[0], "all_gather", "(B, S/tp, H) gradient")

    @override
    def prepare(self, ctx: ApplyContext) -> Commit:
        blocks = [ctx.model.get_submodule(path) for path in self.blocks]
        stack, end = ctx.model.get_submodule(self.path), ctx.model.get_submodule(self.end)
        tokens = ctx.tokens_at(self.end)

        def commit() -> None:
            SequenceStack.swap_class(stack, ctx.shared, tokens=tokens)
            for block in blocks:
                SequenceBlock.swap_class(block, ctx.shared, tokens=tokens, argument=self.argument)
            SequenceEnd.swap_class(end, ctx.shared, tokens=tokens)

        return commit
