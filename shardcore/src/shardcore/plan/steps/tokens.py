"""Steps that divide tokens: between regions (sequence parallelism), or from the first block to the last (context)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.distributed as dist
from torch import nn
from typing_extensions import override

from shardcore.comm.collectives import Channel
from shardcore.errors import Problem
from shardcore.mesh.axes import group_of_ranks
from shardcore.mesh.context import ShardContext
from shardcore.nn.arguments import Argument
from shardcore.nn.base import ParallelMixin
from shardcore.nn.context.logits import ContextHead
from shardcore.nn.context.modules import ContextBlock, ContextEnd, ContextModel, ContextStack
from shardcore.nn.context.shard import ContextShard, Groups, divided_attention, set_shard
from shardcore.nn.costs import Collective, Site, backward, forward
from shardcore.nn.libraries import library_of
from shardcore.nn.randomness import DropoutSites
from shardcore.nn.sequence.tokens import SequenceBlock, SequenceEnd, SequenceStack
from shardcore.plan.steps.base import ApplyContext, Commit, Phase, PlanView, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSequence(Step):
    """Activations between the blocks of the module ``path`` are split along the sequence.

    The first of ``blocks`` that is called splits them, its ``argument``; the output of ``end`` is gathered.
    """

    phase: ClassVar[Phase] = Phase.SEQUENCE

    blocks: tuple[str, ...]
    argument: Argument
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
        tokens = ctx.tokens_at(self.end)

        def of_a_block(block: nn.Module) -> Mapping[str, Any]:
            return {"argument": self.argument, "dropouts": DropoutSites([block], draws=ctx.draws)}

        return self.swapped_all(ctx, {SequenceBlock: of_a_block}, tokens=tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class DivideTokens(Step):
    """The tokens of the module ``path`` are divided over the ranks of ``cp`` while it runs its blocks.

    The first of ``blocks`` that is called divides them, its ``argument``; the output of ``end`` has those of all ranks.

    Attributes:
        attentions: the modules through which tokens see each other.
        across: those through which they see the states of another stack, which every rank has all of.
        exchanging: how many ranks exchange heads.
        rings: between how many groups of these keys and values go round.
        keeps: whether logits stay divided in calls that return a loss.
    """

    phase: ClassVar[Phase] = Phase.CONTEXT
    splits: ClassVar[bool] = False  # over ``tp``
    divides_tokens: ClassVar[bool] = True

    blocks: tuple[str, ...]
    argument: Argument
    end: str
    attentions: tuple[str, ...]
    across: tuple[str, ...]
    exchanging: int
    rings: int
    keeps: bool

    @property
    @override
    def mixins(self) -> tuple[tuple[str, type[ParallelMixin]], ...]:
        blocks = ((block, ContextBlock) for block in self.blocks)
        return ((self.path, ContextStack), *blocks, (self.end, ContextEnd), ("", ContextModel))

    @override
    def describe(self) -> str:
        ways = [f"{self.exchanging} ranks exchange heads"] if self.exchanging > 1 else []
        ways += [f"keys and values go round {self.rings}"] if self.rings > 1 else []
        return f"tokens of {self.argument[0]!r} divided over cp from {self.blocks[0]} to {self.end}: {', '.join(ways)}"

    @override
    def check(self, plan: PlanView) -> Iterator[Problem]:
        model = plan.model
        todo = "leave context_parallel_size None, or shard a model for which there is one"
        library = divided_attention(model)
        if library is None:
            yield self.problem(f"no client for {library_of(model)!r} says how its attention is divided", todo)
            return
        attentions = tuple(model.get_submodule(path) for path in self.attentions)
        replaced = [m for m in attentions for s in plan.at_module(m) if any(kind.plan_attends for _, kind in s.mixins)]
        native = [attention for attention in attentions if attention not in replaced]
        everywhere = (*native, *map(model.get_submodule, self.across))
        if what := library.problem(model, everywhere, ring=self.rings > 1):
            yield self.problem(f"context parallelism: {what}", todo)
        dropouts = DropoutSites(attentions).probabilities if self.rings > 1 else ()
        if rate := max((getattr(module, name) or 0 for module, name in dropouts), default=0):
            what = f"attention with dropout {rate}, which ring_attn does not compute"
            yield self.problem(
                what, "set it to 0 in the model's configuration, or say context_parallel_mode='all_to_all'"
            )

    @override
    def collectives(self, site: Site) -> Iterator[Collective]:
        for path in self.attentions:
            for way in (forward, backward):
                if self.exchanging > 1:
                    yield way(path, "all_to_all", "heads of queries, keys and values")
                    yield way(path, "all_to_all", "tokens of the output")
        yield forward(self.end, "all_gather", "(B, S/cp, H) output")
        yield backward(self.end, "reduce_scatter", "(B, S, H) gradient")

    @override
    def prepare(self, ctx: ApplyContext) -> Commit:
        model = ctx.model
        attentions = [model.get_submodule(path) for path in self.attentions]
        library = divided_attention(model)
        assert library is not None  # or else the plan is refused
        causal = all(getattr(attention, "is_causal", False) for attention in attentions)
        stacks = ctx.divided.stacks if ctx.divided else []
        shard = ContextShard(ctx.shared, _groups(ctx.shared, self.exchanging), library, zigzag=causal, stacks=stacks)
        ctx.divided = shard  # the head reads what the last stack returns

        def of_a_block(block: nn.Module) -> Mapping[str, Any]:
            return {"argument": self.argument, "dropouts": DropoutSites([block], draws=ctx.draws)}

        swap = self.swapped_all(
            ctx, {ContextBlock: of_a_block, ContextModel: lambda _: {"keeps": self.keeps}}, shard=shard
        )

        def commit() -> None:
            swap()
            for attention in attentions:
                set_shard(attention, shard)
            for path in self.across:
                set_shard(model.get_submodule(path), shard, crosses=True)
            library.divide(model)

        return commit


@dataclass(frozen=True, slots=True, kw_only=True)
class DivideLogits(Step):
    """The module ``path``, a head, computes the logits of the tokens of each rank of ``cp``."""

    phase: ClassVar[Phase] = Phase.LOGITS
    mixin: ClassVar[type[ParallelMixin]] = ContextHead
    splits: ClassVar[bool] = False  # over ``tp``
    words: ClassVar[str] = "logits are divided over cp"

    @override
    def collectives(self, site: Site) -> Iterator[Collective]:
        yield forward(self.path, "all_reduce", "(B, S) losses")
        yield backward(self.path, "all_reduce", "(B, S) gradients")

    @override
    def prepare(self, ctx: ApplyContext) -> Commit:
        return self.swapped(ctx, shard=ctx.divided)


def _groups(context: ShardContext, exchanging: int) -> Groups:
    """Return the ranks of ``cp`` by what they send each other; every one of them makes the call."""
    everybody = context.axis("cp")
    rings = everybody.size // exchanging
    ranks = dist.get_process_group_ranks(everybody.group)
    first = everybody.rank // exchanging * exchanging
    together, round_of = ranks[first : first + exchanging], ranks[everybody.rank % exchanging :: exchanging]
    return Groups(
        everybody=everybody,
        heads=_channel(everybody, together) if exchanging > 1 else None,
        ring=_channel(everybody, round_of) if rings > 1 else None,
    )


def _channel(everybody: Channel, ranks: list[int]) -> Channel:
    if len(ranks) == everybody.size:
        return everybody
    return Channel(group_of_ranks(tuple(ranks), str(dist.get_backend(everybody.group))))
