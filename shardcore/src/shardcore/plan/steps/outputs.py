"""Steps around the calls of a whole model: by which methods it is run, what it returns, and its loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from typing_extensions import override

from shardcore.errors import Problem
from shardcore.nn.arguments import Argument
from shardcore.nn.base import ParallelMixin
from shardcore.nn.calls import MethodsAsCalls
from shardcore.nn.costs import Collective, Site, forward
from shardcore.nn.loss.head import LossFromOutputs
from shardcore.nn.loss.logits import VocabParallelLossModel
from shardcore.nn.outputs import OutputGatherer, RefusesCaptured
from shardcore.plan.steps.base import ApplyContext, Commit, Phase, PlanView, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class CallByMethods(Step):
    """The module is run by methods besides its forward."""

    splits: ClassVar[bool] = False
    mixin: ClassVar[type[ParallelMixin]] = MethodsAsCalls

    methods: tuple[str, ...]

    @override
    def describe(self) -> str:
        return f"is run by {', '.join(self.methods)} too"

    @override
    def prepare(self, ctx: ApplyContext) -> Commit:
        if ctx.context is None:
            return lambda: None  # one rank alone runs on torch's own generators, and holds plain parameters
        return self.swapped(ctx)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherOutputs(Step):
    """Outputs that the module captures from its layers are gathered.

    Attributes:
        dims: by output name, the dim that is split over the ranks in each captured tensor, and its full size, or
            the sizes of all ranks' parts where they are uneven.
        by_tokens: outputs that are split along the sequence where sequence parallelism is on.
        places: outputs that take a place in a tuple (``return_dict=False``) even where they are None.
    """

    mixin: ClassVar[type[ParallelMixin]] = OutputGatherer

    dims: tuple[tuple[str, int, int | tuple[int, ...]], ...]
    by_tokens: tuple[str, ...] = ()
    places: tuple[str, ...] = ()

    @override
    def describe(self) -> str:
        gathered = [f"{name} on dim {dim} to {size}" for name, dim, size in self.dims]
        return "gathers " + ", ".join([*gathered, *(f"{name} along the sequence" for name in self.by_tokens)])

    @property
    @override
    def gathers_captured(self) -> tuple[str, ...]:
        return (*(name for name, _, _ in self.dims), *self.by_tokens)

    @override
    def check(self, plan: PlanView) -> Iterator[Problem]:
        below = plan.model.get_submodule(self.path).modules() if self.by_tokens else ()
        stacks = dict.fromkeys(step.path for m in below for step in plan.at_module(m) if step.splits_tokens)
        if len(stacks) > 1 and self.path not in stacks:
            yield self.problem(
                f"the tokens of {', '.join(stacks)} are split, each by itself, and it gathers those of one",
                'say outputs(hidden_states="sequence") under the class of each of them',
            )

    @override
    def prepare(self, ctx: ApplyContext) -> Commit:
        return self.swapped(ctx, tokens=ctx.tokens_below(self.path))


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseCaptured(Step):
    """Outputs that the module could capture from its layers, and that no rule gathers, are refused.

    ``outputs`` are their names, each with a module in which each rank has a part of it.
    """

    mixin: ClassVar[type[ParallelMixin]] = RefusesCaptured

    outputs: tuple[tuple[str, str], ...]

    @override
    def describe(self) -> str:
        return f"refuses to return captured {', '.join(self.refuses_captured)}, which no rule gathers"

    @property
    @override
    def refuses_captured(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeLoss(Step):
    """The loss is computed from what the module's forward returns, not inside it, where ``labels`` are None.

    ``function`` is called with the model, the outputs ``logits`` and the arguments ``labels``.
    """

    mixin: ClassVar[type[ParallelMixin]] = LossFromOutputs

    function: Callable[..., Any]
    labels: tuple[Argument, ...]
    logits: tuple[str, ...]

    @override
    def describe(self) -> str:
        labels = ", ".join(label.name for label in self.labels)
        return f"loss of {', '.join(self.logits)} against {labels} after the forward"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepLogitsSharded(Step):
    """In calls of the module with labels, logits of ``heads`` stay split over the vocabulary.

    ``chunk`` is the number of tokens whose logits are computed at a time, inside the loss; None computes all in the
    head.
    """

    phase: ClassVar[Phase] = Phase.LOGITS
    mixin: ClassVar[type[ParallelMixin]] = VocabParallelLossModel

    labels: Argument
    heads: tuple[str, ...]
    chunk: int | None = None

    @override
    def describe(self) -> str:
        how = "stay split" if self.chunk is None else f"are computed within the loss, {self.chunk} tokens at a time,"
        return f"logits of {', '.join(self.heads)} {how} where {self.labels[0]!r} are given"

    @property
    @override
    def splits_logits(self) -> tuple[str, ...]:
        return self.heads

    @override
    def collectives(self, site: Site) -> Iterator[Collective]:
        for what in ("largest logits", "sums and the labels' logits"):
            yield forward(self.path, "all_reduce", f"(B, S) {what}")

    @override
    def prepare(self, ctx: ApplyContext) -> Commit:
        return self.swapped(ctx, heads=tuple(map(ctx.model.get_submodule, self.heads)))
