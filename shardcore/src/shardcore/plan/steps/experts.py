"""The steps of a mixture of experts: how activations enter and leave it, and what replicas tell each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from shardcore.errors import Problem
from shardcore.nn.arguments import Argument
from shardcore.nn.base import ParallelMixin
from shardcore.nn.costs import Collective, Site, backward, forward
from shardcore.nn.experts.block import ExpertsBlock, ListedExpert, ListedExperts, RouterLogits
from shardcore.plan.steps.base import ApplyContext, Commit, Phase, PlanView, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class EnterExperts(Step):
    """The module ``path`` routes tokens, its ``argument``, to experts, of which each rank has slices.

    ``captured`` is the place, in what the ``router`` returns, of logits that the model captures, if it does.
    """

    phase: ClassVar[Phase] = Phase.ENTER
    splits_heads: ClassVar[bool] = True

    argument: Argument
    router: str
    captured: int | None = None

    @property
    @override
    def mixins(self) -> tuple[tuple[str, type[ParallelMixin]], ...]:
        routers = () if self.captured is None else ((self.router, RouterLogits),)
        return ((self.path, ExpertsBlock), *routers)

    @override
    def describe(self) -> str:
        return f"enters with {self.argument[0]!r} for slices of its experts, sums what they return"

    @override
    def conflict(self, other: Step) -> str | None:
        if isinstance(other, EnterExperts):
            return f"two rules say how the experts at {self.path} are entered, so its input gradient is summed twice"
        return None

    @override
    def check(self, plan: PlanView) -> Iterator[Problem]:
        for module in plan.model.get_submodule(self.path).modules():
            for step in plan.at_module(module):
                if step == self:
                    continue
                if step.enters or step.splits_heads:
                    yield step.problem(
                        f"it would enter again what entered the experts at {self.path}: gradients are summed twice",
                        "name its linears by shared_col= and shared_row= of experts()",
                    )
                elif any(kind.plan_sums_output for _, kind in step.mixins):
                    yield step.problem(
                        f"its output would be summed before {self.path}, which sums all that its experts return",
                        "name its linears by shared_col= and shared_row= of experts()",
                    )
                elif not step.sums_gradients:
                    yield from self._replicated(plan, step)

    def _replicated(self, plan: PlanView, step: Step) -> Iterator[Problem]:
        for full, _ in plan.model.get_submodule(step.path).named_parameters(step.path, recurse=False):
            yield Problem(
                where=full,
                rule=plan.claims[full][0].rule if full in plan.claims else step.describe(),
                what=f"it is inside the experts that are entered at {self.path}: its gradient would be this rank's "
                "summand, and the replicas would drift apart",
                todo=f"say partial(...) of {step.path}, which sums it",
            )

    @override
    def collectives(self, site: Site) -> Iterator[Collective]:
        if site.split:
            yield forward(self.path, "all_gather", "(B, S/tp, H) input")
            yield forward(self.path, "reduce_scatter", "(B, S, H) output")
            yield backward(self.path, "all_gather", "(B, S/tp, H) output gradient")
            yield backward(self.path, "reduce_scatter", "(B, S, H) input gradient")
        else:
            yield forward(self.path, "all_reduce", "(B, S, H) output")
            yield backward(self.path, "all_reduce", "(B, S, H) input gradient")

    @override
    def prepare(self, ctx: ApplyContext) -> Commit:
        module, router = ctx.model.get_submodule(self.path), ctx.model.get_submodule(self.router)
        tokens = ctx.tokens_at(self.path)

        def commit() -> None:
            ExpertsBlock.swap_class(module, ctx.shared, argument=self.argument)._take_sequence(tokens)
            if self.captured is not None:
                RouterLogits.swap_class(router, ctx.shared, captured=self.captured)

        return commit


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncRouting(Step):
    """Replicas tell each other which ``experts`` (so many) of the module ``path`` they have called.

    ``weights`` is their list, named from the module.
    """

    splits: ClassVar[bool] = False
    phase: ClassVar[Phase] = Phase.SCOPE

    weights: str
    experts: int

    @property
    @override
    def mixins(self) -> tuple[tuple[str, type[ParallelMixin]], ...]:
        below = f"{self.path}.{self.weights}" if self.path else self.weights
        return ((self.path, ListedExperts), *((f"{below}.{i}", ListedExpert) for i in range(self.experts)))

    @override
    def describe(self) -> str:
        return f"tells the other replicas which of its {self.experts} experts had tokens"

    @override
    def prepare(self, ctx: ApplyContext) -> Commit:
        return self.swapped_all(ctx, {ListedExperts: lambda _: {"weights": self.weights}})
