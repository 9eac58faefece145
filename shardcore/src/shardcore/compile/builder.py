"""What planning gathers while it goes through the rules of a policy: claims, steps and problems."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from typing_extensions import override

from shardcore.config import ShardConfig
from shardcore.errors import PlanError, Problem
from shardcore.nn import Layout, ParallelMixin
from shardcore.nn.context.shard import divided_attention
from shardcore.nn.layout import ExpertsLayout
from shardcore.plan.steps.base import ParameterClaim, PlanView, Step, above
from shardcore.plan.steps.modules import Swap
from shardcore.policy import HeadCounts, Policy, Rule, Scope
from shardcore.styles._finding import dotted, is_in, submodule

#: What a policy's `module_policy` yields, in lists.
Rules = Mapping[str | type[nn.Module] | nn.Module, Sequence[Rule]]

#: Given a native class and the class that would replace it: the class to be used in its place, or None.
Modules = Callable[[type[nn.Module], type[ParallelMixin]], type[ParallelMixin] | None]


@dataclass
class PlanBuilder(PlanView):
    """What planning has gathered so far."""

    model: nn.Module
    config: ShardConfig
    ranks: int
    claims: dict[str, list[ParameterClaim]] = field(default_factory=dict)
    steps: dict[str, Step] = field(default_factory=dict)  # by their representation: options may be unhashable
    steps_at: dict[str, list[Step]] = field(default_factory=dict)  # the same by path: only those of one path conflict
    named: dict[str, nn.Module] = field(init=False)  # the modules by all of their names
    paths: dict[int, str] = field(init=False)  # the first name of each module, by identity
    problems: list[Problem] = field(default_factory=list)
    refusals: list[Problem] = field(default_factory=list)  # if any, the problems of other rules follow from them
    modules: Modules | None = None  # what packs bring in place of parallel modules
    attentions: list[str] = field(default_factory=list)  # modules before which each rank has its own heads

    def __post_init__(self) -> None:
        self.named = dict(self.model.named_modules(remove_duplicate=False))
        self.paths = {id(module): path for path, module in reversed(self.named.items())}

    @override
    def at_module(self, module: nn.Module) -> Sequence[Step]:
        return self.steps_at.get(self.paths[id(module)], ()) if id(module) in self.paths else ()

    def report(self, *, what: str, todo: str, where: str = "", rule: str = "(none)") -> None:
        """Record a problem, unless it is known."""
        self._record(Problem(where=where, rule=rule, what=what, todo=todo))

    def add(self, step: Step) -> list[str]:
        """Add a step, unless one at its path says the same; return why it cannot be carried out beside others."""
        others = self.steps_at.setdefault(step.path, [])
        if any(step.same_as(other) for other in others):
            return []
        conflicts = [what for other in others if (what := step.conflict(other))]
        if self.steps.setdefault(repr(step), step) is step:
            others.append(step)
        return conflicts

    def add_late(self, step: Step) -> None:
        """Add a step that no rule has asked for, and report what does not fit."""
        self.problems += [step.problem(what, "keep one of them") for what in self.add(step)]
        self._record(*step.check(self))

    def check(self) -> None:
        """Let every step say what does not fit between it and the others."""
        for step in list(self.steps.values()):
            self._record(*step.check(self))
        if (self.config.expert_parallel_size or 1) > 1 and not any(
            isinstance(claim.layout, ExpertsLayout) for claims in self.claims.values() for claim in claims
        ):
            self.report(
                rule=f"ShardConfig.expert_parallel_size={self.config.expert_parallel_size}",
                what="the model has no experts that the policy shares among replicas",
                todo="leave it None, or add an experts(...) rule to the policy",
            )
        # One rank alone carries none of them out; what the policy says is the same.
        if self.config.enable_sequence_parallelism and not any(step.splits_tokens for step in self.steps.values()):
            self.report(
                rule="ShardConfig.enable_sequence_parallelism=True",
                what="the policy does not say between which modules tokens may be split",
                todo="turn it off, or add a sequence(scatter=..., gather=...) rule to the policy",
            )

        if (self.config.context_parallel_size or 1) > 1 and not any(s.divides_tokens for s in self.steps.values()):
            library = divided_attention(self.model)
            self.report(
                rule=f"ShardConfig.context_parallel_size={self.config.context_parallel_size}",
                what=(library and library.reason(self.model))
                or "the policy does not say where tokens of different ranks attend to each other",
                todo="leave it None (enable_sequence_parallelism divides tokens between regions), or add attention=... "
                "to the sequence(...) rule of the policy, after gradients were compared with those of one rank",
            )

    def failure(self, policy: Policy, problems: Sequence[Problem]) -> PlanError:
        """Return the error that says all ``problems`` of a policy with the model."""
        fit = f"{type(policy).__qualname__} does not fit {type(self.model).__qualname__}"
        return PlanError(f"{fit} at tensor_parallel_size {self.ranks}", problems)

    def _record(self, *problems: Problem) -> None:
        self.problems += [problem for problem in dict.fromkeys(problems) if problem not in self.problems]

    @property
    def carried_out(self) -> list[Step]:
        """The steps that these ranks have a use for: one rank alone splits nothing."""
        return [step for step in self.steps.values() if self.ranks > 1 or not step.splits]


@dataclass
class Part:
    """A submodule that a policy of its own serves; the path of the whole model is ``""``.

    Attributes:
        inner: the paths of the parts that its rules delegate.
        heads: what the policy's checks count, by the class whose heads they are; None if they cannot be split.
    """

    path: str
    module: nn.Module
    policy: Policy
    origin: str
    rules: Rules
    inner: list[str] = field(default_factory=list)
    heads: dict[str, HeadCounts | None] = field(default_factory=dict)

    def holds(self, path: str) -> bool:
        """Tell whether the module ``path`` is this part's own, and no inner part's."""
        return is_in(path, self.path) and not any(is_in(path, inner) for inner in self.inner)


def matches(module: nn.Module, key: str | type[nn.Module] | nn.Module) -> bool:
    """Tell whether ``key`` of a `ModulePolicy` means the module."""
    return key is module or any(cls is key or cls.__name__ == key for cls in type(module).__mro__)


@dataclass
class RuleScope(Scope):
    """`shardcore.policy.Scope` for one rule and one module."""

    builder: PlanBuilder
    part: Part
    rule: Rule
    path: str
    module: nn.Module

    @property
    @override
    def config(self) -> ShardConfig:
        return self.builder.config

    @property
    @override
    def ranks(self) -> int:
        return self.builder.ranks

    @property
    @override
    def heads(self) -> HeadCounts | None:
        if self._heads_of not in self.part.heads:
            what = "the rule needs the numbers of heads, which the policy does not declare"
            self.problem(what, "add Heads(...) to the policy's checks")
        return self.known_heads

    @property
    @override
    def known_heads(self) -> HeadCounts | None:
        return self.part.heads.get(self._heads_of)

    @property
    def _heads_of(self) -> str:
        return next((kind for kind in self.part.heads if kind and matches(self.module, kind)), "")

    @override
    def name(self, suffix: str) -> str:
        name = ".".join(filter(None, (self.path, dotted(suffix))))
        if (found := self.builder.named.get(name)) is None:
            found = submodule(self.builder.model, name)  # an attribute that is no child
        # A module under two names is one module: its first name stands for all.
        return self.builder.paths.get(id(found), name)

    @override
    def find(self, suffix: str) -> nn.Module | None:
        found = submodule(self.module, suffix)
        if found is None and not self.rule.optional:
            what = absence(self.module, suffix)
            self.problem(what, "correct the name for this version of the model, or say optional=True")
        return found

    @override
    def above(self) -> Iterator[tuple[str, nn.Module]]:
        for path in (self.path, *above(self.path)):
            if is_in(path, self.part.path):
                yield path, self.builder.named[path]

    @override
    def swap(self, suffix: str, target: type[ParallelMixin], **options: Any) -> type[ParallelMixin]:
        module = self.module.get_submodule(dotted(suffix))
        if self.builder.modules is not None:
            target = self.builder.modules(type(module), target) or target
        if problem := target.refusal(module, self.ranks, **options):
            self.problem(problem, "correct the rule, or use another tensor_parallel_size", suffix)
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self.claim(suffix, name, None)  # said already: not "covered by no rule" too
            return target
        self.add(Swap(path=self.name(suffix), target=target, options=tuple(sorted(options.items()))))
        for name, layout in target.layouts(module, self.ranks, **options).items():
            self.claim(suffix, name, layout)
        return target

    @override
    def claim(self, suffix: str, parameter: str, layout: Layout | None) -> None:
        name = ".".join(filter(None, (self.name(suffix), parameter)))
        claims = self.builder.claims.setdefault(name, [])
        claim = ParameterClaim(name, self.rule.text, layout, ".".join((self.path, suffix, parameter)))
        # A module under two names may be reached by both, if they say the same.
        if not any(c.layout == layout and (c.asked != claim.asked or c.rule == claim.rule) for c in claims):
            claims.append(claim)

    @override
    def add(self, step: Step) -> None:
        for what in self.builder.add(step):
            self.problem(what, "keep one of them")

    @override
    def splits_attention(self, suffix: str) -> None:
        self.builder.attentions.append(self.name(suffix))

    @override
    def problem(self, what: str, todo: str, suffix: str = "") -> None:
        self.builder.report(where=self.name(suffix), rule=self.rule.text, what=what, todo=todo)

    @override
    def refuse(self, what: str, todo: str) -> None:
        self.builder.refusals.append(Problem(where=self.name(""), rule=self.rule.text, what=what, todo=todo))


def absence(module: nn.Module, suffix: str, wanted: str = "submodule") -> str:
    """Say where the way to the submodule ``suffix`` ends, and how it could go on."""
    *parts, last = dotted(suffix).split(".")
    way = []
    for part in parts:
        if not isinstance(child := getattr(module, part, None), nn.Module):
            last = part
            break
        module = child
        way.append(part)
    owner = f"{type(module).__name__} ({'.'.join(way)})" if way else type(module).__name__
    names = ", ".join(name for name, _ in module.named_children()) or "none"
    return f"{owner} has no {wanted} {last!r}; its children are {names}"
