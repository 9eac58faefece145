"""What one model class needs in order to be sharded: a description, no action.

`Policy` is the class that packs subclass; its rules are written with the constructors of `shardcore.styles`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

from torch import nn
from typing_extensions import override

from shardcore.config import ShardConfig
from shardcore.errors import NotSupportedError
from shardcore.nn import Layout, ParallelMixin
from shardcore.plan.stages import Stages
from shardcore.plan.steps.base import Step
from shardcore.plan.steps.local import Recompute

__all__ = ["Check", "HeadCounts", "Heads", "ModulePolicy", "Policy", "Rule", "Scope", "Stages", "Word"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadCounts:
    """Numbers of attention heads: ``query`` and ``kv`` of the full model, and what ``rank`` of ``ranks`` ranks uses.

    Each rank has consecutive query heads; where the ranks do not divide their number, the first ranks have one more.
    Query heads attend to KV heads in equal groups, in their order. A rank uses the KV heads of its query heads; where
    it has parts of groups, so that it would use some more often than others, heads are repeated until all are used
    equally often.
    """

    query: int
    kv: int
    ranks: int
    rank: int = 0

    def at(self, rank: int) -> HeadCounts:
        """Return the same of another rank."""
        return replace(self, rank=rank)

    @property
    def query_heads(self) -> range:
        """The query heads of the rank."""
        each, more = divmod(self.query, self.ranks)
        start = self.rank * each + min(self.rank, more)
        return range(start, start + each + (self.rank < more))

    @property
    def kv_heads(self) -> tuple[int, ...]:
        """The KV heads that the rank uses, in the order of its query heads; some of them repeated, if need be."""
        used = Counter(head * self.kv // self.query for head in self.query_heads)
        together = math.gcd(*used.values())
        return tuple(head for head, times in used.items() for _ in range(times // together))

    @property
    def local_query(self) -> int:
        """Query heads of the rank."""
        return len(self.query_heads)

    @property
    def local_kv(self) -> int:
        """KV heads that the rank uses; with fewer heads than ranks each uses one."""
        return len(self.kv_heads)

    @property
    def is_even(self) -> bool:
        """Whether ranks have equally many query heads, and equally many KV heads or equal shares of one."""
        return not self.query % self.ranks and (not self.kv % self.ranks or not self.ranks % self.kv)

    @property
    def kv_replication(self) -> int:
        """How many neighbouring ranks use the same KV head, where heads are even; 1 if there is a head for each."""
        return max(1, self.ranks // self.kv)


class Scope(Protocol):
    """One module of the model while a rule is planned for it; names are relative to that module."""

    module: nn.Module

    @property
    def config(self) -> ShardConfig:
        """The resolved configuration."""

    @property
    def ranks(self) -> int:
        """The number of tensor-parallel ranks."""

    @property
    def heads(self) -> HeadCounts | None:
        """Head counts, if the policy's checks declare them and they can be split; else a problem is recorded."""

    @property
    def known_heads(self) -> HeadCounts | None:
        """The same for rules that do without."""

    def name(self, suffix: str) -> str:
        """Return the full name of a submodule."""

    def find(self, suffix: str) -> nn.Module | None:
        """Return a submodule; if there is none, record a problem (unless the rule is optional) and return None."""

    def above(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the full name of the module and the module, then the same of its parents.

        The last is the model, or the submodule that has been delegated to the policy (`shardcore.styles.delegate`).
        """

    def swap(self, suffix: str, target: type[ParallelMixin], **options: Any) -> type[ParallelMixin]:
        """Plan that a submodule becomes a ``target``, and claim its parameters with the layouts that it gives them.

        Returns ``target``, or the class that a pack provides in its place.
        """

    def claim(self, suffix: str, parameter: str, layout: Layout | None) -> None:
        """Give one parameter of a submodule its layout; ``None`` if a user's callable decides it."""

    def add(self, step: Step) -> None:
        """Plan any other step."""

    def splits_attention(self, suffix: str) -> None:
        """Say that attention weights before a submodule are those of this rank's heads, for rules that split heads.

        Where no rule of the policy gathers them, the model will refuse to return them.
        """

    def problem(self, what: str, todo: str, suffix: str = "") -> None:
        """Record a problem."""

    def refuse(self, what: str, todo: str) -> None:
        """Record that the module cannot be sharded; problems of other rules with it are then not reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule(ABC):
    """One line of a policy: a style and the submodules it applies to.

    Attributes:
        text: the rule as its author wrote it, for messages.
        optional: the rule may match nothing.
    """

    text: str
    optional: bool = False

    @abstractmethod
    def plan(self, scope: Scope) -> None:
        """Plan the rule for one module of the class it is listed under."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Word(Rule):
    """A rule that is one function, which a constructor defines in itself: so most words of `shardcore.styles` are made.

    Two are equal if they are written alike.

    Attributes:
        planned: called with the module of the class that the rule is listed under.
    """

    planned: Callable[[Scope], object] = field(repr=False, compare=False)

    @override
    def plan(self, scope: Scope) -> None:
        self.planned(scope)


class Check(Protocol):
    """A condition on the model's configuration, checked once for each plan."""

    def problem(self, model: nn.Module, ranks: int) -> tuple[str, str] | None:
        """Return what is wrong and what to do, or None."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Names of the configuration attributes that count attention heads.

    Attributes:
        query: the attribute of ``model.config`` with the number of query heads, or their number itself.
        kv: the same of key/value heads, of which multi-query attention has 1; None if there is one for each query head.
        of: the class of modules whose rules mean these heads, where others than the attention have heads of their own.
        uneven: ranks may have unequal numbers of heads, where their number does not divide: the rules set every number
            of heads that a forward reads, by functions of `HeadCounts` or `per_rank`.
    """

    query: str | int
    kv: str | int | None = None
    uneven: bool = False
    of: str = ""

    def counts(self, model: nn.Module, ranks: int) -> HeadCounts | None:
        """Return the head counts of ``model``, or None if its configuration does not have the attributes."""
        config = getattr(model, "config", None)
        query = getattr(config, self.query, None) if isinstance(self.query, str) else self.query
        kv = getattr(config, self.kv, None) if isinstance(self.kv, str) else self.kv
        if query is None:
            return None
        return HeadCounts(query=query, kv=query if kv is None else kv, ranks=ranks)

    def problem(self, model: nn.Module, ranks: int) -> tuple[str, str] | None:
        """Return why the heads cannot be split over ``ranks`` ranks and what to do, or None if they can."""
        counts = self.counts(model, ranks)
        if counts is None:
            return f"model.config has no attribute {self.query!r}", "name the attribute that counts heads in Heads(...)"
        query, kv = (
            f"{count} {kind} heads" + (f" ({name})" if isinstance(name, str) else "")
            for count, kind, name in ((counts.query, "query", self.query), (counts.kv, "key/value", self.kv))
        )
        if counts.query % counts.kv:
            what = f"{query} are not equally many for each of {kv}"
            return what, "correct Heads(...) in the policy's checks"
        if self.uneven:
            if counts.query >= ranks:
                return None
            what = f"{query} cannot be split over {ranks} ranks: each needs one"
            return what, f"use a tensor_parallel_size of at most {counts.query}"
        if counts.query % ranks:
            fits = [n for n in range(1, counts.query + 1) if counts.query % n == 0]
            what = f"{query} cannot be split over {ranks} ranks: whole heads are needed on each rank"
            return what, f"use a tensor_parallel_size of {', '.join(map(str, fits))}"
        if counts.kv % ranks and ranks % counts.kv:
            what = f"{kv} cannot be shared by {ranks} ranks: one number has to divide the other"
            return what, f"use a tensor_parallel_size that divides {counts.kv} or is a multiple of it"
        return None


#: Rules by the class (or class name) of the modules they apply to, or for one module. What yields rules is as good as a
#: list of them.
ModulePolicy = Mapping[str | type[nn.Module] | nn.Module, Iterable[Rule]]


class Policy(ABC):
    """Describes how one model class is sharded.

    A subclass implements `module_policy` and usually sets `checks` and `stages`. It does not ask which parallelism is
    on: on an axis of size one its rules have no effect. Compiling a plan calls the ``set_`` methods and those that
    describe, which change nothing; `preprocess` and `postprocess` run while the model is being changed.

    After Shardformer's ``Policy`` (ColossalAI).
    """

    #: Conditions on the configuration; all that fail are reported together.
    checks: ClassVar[tuple[Check, ...]] = ()
    #: Where the model can be cut into blocks and stages.
    stages: Stages | None = None
    #: The policies of the submodules that its rules delegate, by path; compiling a plan sets them.
    parts: Mapping[str, Policy] = MappingProxyType({})
    #: The names in ``ShardConfig.extra_kwargs`` that the policy reads.
    extra_kwargs: ClassVar[frozenset[str]] = frozenset()

    def __init__(self) -> None:
        self.model: Any = None
        self.shard_config = ShardConfig()

    def set_model(self, model: nn.Module) -> None:
        """Make ``model`` available to the other methods as ``self.model``."""
        self.model = model

    def set_shard_config(self, shard_config: ShardConfig) -> None:
        """Make the configuration available as ``self.shard_config``; a policy reads only its ``extra_kwargs``."""
        self.shard_config = shard_config

    def preprocess(self) -> nn.Module | None:
        """Change ``self.model`` before it is sharded (for example, resize an embedding); by default nothing."""
        return None

    @abstractmethod
    def module_policy(self) -> ModulePolicy:
        """Return the rules for each class of modules."""

    def new_model_class(self) -> type[nn.Module] | None:
        """Return a subclass of the model's class to use for this one instance, or None to keep the class."""
        return None

    def new_part_class(self, part: nn.Module) -> type[nn.Module] | None:
        """Return what `new_model_class` returns, for a submodule that users treat as a model too; by default None."""
        return None

    def postprocess(self) -> nn.Module | None:
        """Change ``self.model`` after it was sharded; by default nothing."""
        return None

    def flash_attention(self, device_type: str, *, asked: bool | str) -> Step:
        """Return the step that makes ``self.model`` use flash attention.

        Args:
            device_type: where the model will run, ``"cuda"`` or ``"cpu"``.
            asked: the user asked for it (``enable_flash_attention=True``), or for one kind of it by name, and did not
                leave it to ``"auto"``.

        Raises:
            NotSupportedError: it is impossible; the message is the reason.
        """
        raise NotSupportedError(f"{type(self).__qualname__} knows no other attention for its model")

    def builder(self, model: nn.Module) -> Callable[[], nn.Module] | None:
        """Return what builds an unsharded model like ``model``, for `shardcore.initialize`; None if it cannot know."""
        return None

    def recompute(self, path: str, block: nn.Module) -> Step:
        """Return the step by which ``block``, at ``path``, recomputes its activations in the backward.

        Raises:
            NotSupportedError: it is impossible; the message is the reason.
        """
        return Recompute(path=path)
