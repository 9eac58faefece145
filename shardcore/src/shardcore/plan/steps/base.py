"""What every step of a plan knows of itself: when it is carried out, with what it conflicts, what it costs, and how."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from torch import nn

from shardcore.errors import Problem
from shardcore.mesh.context import ShardContext
from shardcore.nn.base import ParallelMixin
from shardcore.nn.context.shard import ContextShard
from shardcore.nn.costs import Collective, Site
from shardcore.nn.layout import Layout
from shardcore.nn.sequence.shard import SequenceShard
from shardcore.plan.digest import to_data

#: Keyword arguments as a hashable value.
Options = tuple[tuple[str, Any], ...]

#: Changes the model; cannot fail, and what it returns is not used.
Commit = Callable[[], object]


class Phase(enum.IntEnum):
    """When a step is carried out: each phase builds on what those before it made of the model."""

    #: A norm is fused before it is made to read replicated parameters.
    FUSE = enum.auto()
    #: Modules become parallel.
    SWAP = enum.auto()
    #: What builds on parallel modules, or on nothing, in the order of the policy.
    CHANGE = enum.auto()
    #: Activations enter regions between parallel modules.
    ENTER = enum.auto()
    #: Tokens are split between regions.
    SEQUENCE = enum.auto()
    #: Tokens are divided around that.
    CONTEXT = enum.auto()
    #: Logits are split around whatever else a model does with its labels.
    LOGITS = enum.auto()
    #: Blocks are compiled, or recomputed, with all that earlier steps made of them.
    COMPILE = enum.auto()
    RECOMPUTE = enum.auto()
    #: Around everything else that a module does.
    SCOPE = enum.auto()


@dataclass
class ParameterClaim:
    """A line of the policy, as its author wrote it, says how one parameter lies; None if a user's callable decides.

    ``asked`` is the name by which the rule reached it.
    """

    name: str
    rule: str
    layout: Layout | None
    asked: str


class PlanView(Protocol):
    """What a step may ask about the plan that it is in, while the plan is checked."""

    model: nn.Module
    #: By the parameter's full name; the first claim counts, others are a problem of their own.
    claims: dict[str, list[ParameterClaim]]

    def at_module(self, module: nn.Module) -> Sequence[Step]:
        """Return the steps at one module, whatever its name."""


class ApplyContext:
    """What steps work with while they are prepared: the model, its place on the mesh, and the state they share.

    Attributes:
        model: the model that is sharded.
        context: None if there is only one rank; then only steps that split nothing are carried out.
        draws: which of torch's random functions the code of classes names, for all `DropoutSites` of the model.
        divided: how tokens are divided over ``cp``, once the step that says so is prepared.
    """

    def __init__(self, model: nn.Module, steps: Sequence[Step], context: ShardContext | None) -> None:
        self.model, self.context = model, context
        self.draws: dict[type[nn.Module], frozenset[str]] = {}
        self.divided: ContextShard | None = None
        # One for each stack of blocks; whatever depends on the number of its tokens is given the same one.
        self._tokens = [(step, SequenceShard(self.shared)) for step in steps if step.splits_tokens]
        self._gathered = {path for step in steps for path in step.gathers_tokens}

    @property
    def shared(self) -> ShardContext:
        """The context, for steps that split."""
        if self.context is None:
            raise RuntimeError("one rank alone was given a plan with steps that split")
        return self.context

    def tokens_at(self, path: str) -> SequenceShard | None:
        """Return how the tokens at a module are split; None where they never are."""
        if not self._gathered.isdisjoint((path, *above(path))):
            return None
        return next((tokens for step, tokens in self._tokens[::-1] if step.splits_tokens_of(path)), None)

    def tokens_below(self, path: str) -> SequenceShard | None:
        """Return how the tokens of a module's own stack are split, else of the one below it, else those at it."""
        inside = [(step.path, tokens) for step, tokens in self._tokens if path in (step.path, *above(step.path))]
        own = dict(inside).get(path)
        return own or next((tokens for _, tokens in inside), None) or self.tokens_at(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One thing done to the module ``path`` (its full name in the model)."""

    #: When it is carried out.
    phase: ClassVar[Phase] = Phase.CHANGE
    #: What it adds to the mixins of the module ``path``; a step that adds more says so in `mixins`.
    mixin: ClassVar[type[ParallelMixin] | None] = None
    #: Whether the ranks of ``cp`` divide the tokens of a call by it.
    divides_tokens: ClassVar[bool] = False
    #: The step in a few words, without its path, where these are always the same.
    words: ClassVar[str] = ""

    path: str

    @property
    def splits(self) -> bool:
        """Whether the step splits something over ``tp``, so that one rank alone there has no use for it."""
        return True

    def describe(self) -> str:
        """Return the step in a few words, without its path."""
        return self.words or self._fields()

    def _fields(self) -> str:
        values = (f"{f.name}={to_data(getattr(self, f.name))!r}" for f in dataclasses.fields(self) if f.name != "path")
        return f"{type(self).__name__}({', '.join(values)})"

    def in_full(self) -> str:
        """Return the step with its path and all its fields, the same in every process."""
        return f"{self.path or 'the model'} {self._fields()}"

    @property
    def mixins(self) -> tuple[tuple[str, type[ParallelMixin]], ...]:
        """What it adds to the mixins of modules, with their paths: around what earlier steps have added."""
        return () if self.mixin is None else ((self.path, self.mixin),)

    @property
    def splits_heads(self) -> bool:
        """Whether activations are split over the ranks below the module, between its entry and a row linear."""
        return False

    @property
    def splits_tokens(self) -> tuple[str, ...]:
        """The modules below which activations are split along the sequence, in the order in which they run."""
        return ()

    def splits_tokens_of(self, path: str) -> bool:
        """Tell whether the module ``path`` works on tokens that the step splits, or inside regions between them."""
        return not {path, *above(path)}.isdisjoint(self.splits_tokens)

    @property
    def gathers_captured(self) -> tuple[str, ...]:
        """The outputs of the module that are captured from its layers, and gathered."""
        return ()

    @property
    def refuses_captured(self) -> tuple[str, ...]:
        """The outputs that the module would capture from its layers, and does not return."""
        return ()

    @property
    def gathers_tokens(self) -> tuple[str, ...]:
        """The modules that see all tokens though they are below one of `splits_tokens`."""
        return ()

    @property
    def reads_together(self) -> tuple[str, ...]:
        """The modules whose parts of parameters are gathered for use by one collective for each kind of part."""
        return ()

    @property
    def splits_logits(self) -> tuple[str, ...]:
        """The heads whose logits stay split over the vocabulary, by their full names."""
        return ()

    @property
    def enters(self) -> bool:
        """Whether activations enter a region at each call of the module, and at its call alone."""
        return False

    @property
    def sums_gradients(self) -> bool:
        """Whether the gradients of the module's own parameters are right inside a region, as far as the step knows."""
        return True

    @property
    def fuses(self) -> str | None:
        """What the module, a norm, computes with instead of operations one by one; None if the step fuses nothing."""
        return None

    def same_as(self, other: Step) -> bool:
        """Tell whether ``other``, at the same path, does the same, so that one of the two is left out."""
        return self == other

    def conflict(self, other: Step) -> str | None:
        """Say why this step and ``other``, at the same path, cannot both be carried out, or return None."""
        return None

    def check(self, plan: PlanView) -> Iterator[Problem]:
        """Yield the problems of this step with the rest of the plan."""
        return iter(())

    def on_split_tokens(self) -> str | None:
        """Say why the step cannot be carried out between split tokens, or return None."""
        return None

    def collectives(self, site: Site) -> Iterator[Collective]:
        """Yield what one training step sends because of it."""
        return iter(())

    def prepare(self, ctx: ApplyContext) -> Commit:
        """Do everything about the step that can fail, and return the call that changes the model."""
        return self.swapped(ctx)

    def swapped(self, ctx: ApplyContext, **more: Any) -> Commit:
        """Return the call that gives the module the step's `mixin`; its options are the other fields, and ``more``."""
        assert self.mixin is not None  # or else the step says itself what it does
        options = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "path"} | more
        context: Any = ctx.shared if self.splits else ctx.context
        return functools.partial(self.mixin.swap_class, ctx.model.get_submodule(self.path), context, **options)

    def swapped_all(
        self,
        ctx: ApplyContext,
        own: Mapping[type[ParallelMixin], Callable[[nn.Module], Mapping[str, Any]]],
        **shared: Any,
    ) -> Commit:
        """Return the call that gives modules their mixins, in the order of `mixins`; ``own`` options of a mixin."""
        modules = [(ctx.model.get_submodule(path), mixin) for path, mixin in self.mixins]

        def commit() -> None:
            for module, mixin in modules:
                mixin.swap_class(module, ctx.shared, **shared, **(own[mixin](module) if mixin in own else {}))

        return commit

    def problem(self, what: str, todo: str) -> Problem:
        """Return a problem with this step."""
        return Problem(where=self.path, rule=self.describe(), what=what, todo=todo)


def above(path: str) -> Iterator[str]:
    """Yield the paths of the parents of the module ``path``, from the nearest to the model (``""``)."""
    while path:
        path = path.rpartition(".")[0]
        yield path
