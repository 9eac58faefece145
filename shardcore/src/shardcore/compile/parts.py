"""The parts of a model that different policies serve: the model itself, and the submodules that rules delegate."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from torch import nn

from shardcore.compile.builder import Part, PlanBuilder, Rules, absence, matches
from shardcore.errors import NoPolicyError, Problem, ShardcoreError
from shardcore.plan import Stages
from shardcore.policy import Policy
from shardcore.styles._finding import is_in, names_of
from shardcore.styles.models import DelegateRule

#: Returns the policy for a class of models, and the distribution and version that it comes from.
Delegates = Callable[[type[nn.Module]], tuple[Policy, str]]


def _nested(path: str, other: str) -> bool:
    return is_in(path, other) or is_in(other, path)


def policy_at(policy: Policy, path: str) -> Policy:
    """Return the policy that serves the module ``path`` of the model of ``policy``."""
    outer = [part for part in policy.parts if is_in(path, part)]
    return policy.parts[max(outer, key=len)] if outer else policy


@dataclass
class PartFinder:
    """Finds the parts of a model.

    Those that no rule gives come from ``delegates``. ``known`` are the policies that an earlier search has found, by
    path: they may have changed the model meanwhile.
    """

    builder: PlanBuilder
    delegates: Delegates | None
    known: Mapping[str, Policy]

    def find(self, policy: Policy, origin: str) -> list[Part]:
        """Return all parts, the whole model first, outer ones before inner ones, and set ``policy.parts``."""
        parts = [self._part("", self.builder.model, policy, origin)]
        for part in parts:  # grows while it is gone through
            for found, rule in self._inner(part):
                known = next((other for other in parts if other.path == found.path), None)
                if known is None:
                    part.inner.append(found.path)
                    parts.append(found)
                elif type(known.policy) is not type(found.policy):  # a module under two names is one part
                    both = f"{type(known.policy).__qualname__} and {type(found.policy).__qualname__}"
                    what = f"it is delegated to two policies, {both}"
                    self.builder.report(where=found.path, rule=rule.text, what=what, todo="keep one of them")
        policy.parts = {part.path: part.policy for part in parts[1:]}
        return parts

    def _part(self, path: str, module: nn.Module, policy: Policy, origin: str) -> Part:
        policy.set_model(module)
        policy.set_shard_config(self.builder.config)
        return Part(path=path, module=module, policy=policy, origin=origin, rules=self._rules(policy))

    def _rules(self, policy: Policy) -> Rules:
        try:
            return {key: list(rules) for key, rules in policy.module_policy().items()}
        except ShardcoreError:
            raise
        except Exception as error:
            rule, what = f"{type(policy).__qualname__}.module_policy", f"it raised {type(error).__name__}: {error}"
            todo = "correct the policy, which is at fault or too new or old"
            raise self.builder.failure(policy, [Problem(where="", rule=rule, what=what, todo=todo)]) from error

    def _inner(self, part: Part) -> Iterator[tuple[Part, DelegateRule]]:
        """Yield the parts that the rules of ``part`` delegate, from the outside to the inside."""
        rules = [(key, rule) for key, value in part.rules.items() for rule in value if isinstance(rule, DelegateRule)]
        if not rules:
            return
        for path, module in part.module.named_modules(prefix=part.path):
            for rule in (rule for key, rule in rules if part.holds(path) and matches(module, key)):
                found = self._delegated(path, module, rule)
                around = next((p for p in part.inner if found and p != found.path and _nested(p, found.path)), None)
                if around is not None and found is not None:
                    what, todo = f"it and {around} are delegated, and one is inside of the other", "keep one of them"
                    self.builder.report(where=found.path, rule=rule.text, what=what, todo=todo)
                elif found is not None:
                    yield found, rule

    def _delegated(self, path: str, owner: nn.Module, rule: DelegateRule) -> Part | None:
        module: nn.Module | None = owner
        for name in rule.name.split("."):
            module = getattr(module, name, None) if name else None
        where = ".".join(filter(None, (path, rule.name)))
        if module is None and rule.optional:
            return None
        if not isinstance(module, nn.Module):
            what, todo = "it would delegate the module to its own policy again", "name a submodule"
            if rule.name:
                what = absence(owner, rule.name)
                todo = "correct the name for this version of the model, or say optional=True"
            self.builder.report(where=where, rule=rule.text, what=what, todo=todo)
            return None
        where = self.builder.paths.get(id(module), where)
        policy, origin = self._policy(where, module, rule)
        return self._part(where, module, policy, origin)

    def _policy(self, path: str, module: nn.Module, rule: DelegateRule) -> tuple[Policy, str]:
        if rule.policy is not None:
            known = self.known.get(path)
            if isinstance(rule.policy, type):
                return (known if type(known) is rule.policy else rule.policy()), ""
            return rule.policy, ""
        whole = type(self.builder.model).__name__
        said = f"{whole} delegates its part {path!r}, a {type(module).__name__}, to the pack for it"
        if self.delegates is None:
            raise NoPolicyError(f"{said}, and compile_plan was given no delegates=; pass Registry.policy_for")
        try:
            policy, origin = self.delegates(type(module))
        except NoPolicyError as error:
            way = f"  way out: say delegate({rule.name!r}, policy=...) in the policy of {whole}"
            raise NoPolicyError(f"{said}:\n{error}\n{way}") from None
        except ShardcoreError as error:
            error.add_note(f"{said}.")
            raise
        known = self.known.get(path)
        return (known if type(known) is type(policy) else policy), origin


def joined_stages(builder: PlanBuilder, parts: Sequence[Part]) -> Stages | None:
    """Return the stages of the whole model, with those of its parts where their names stand in ``blocks``."""
    by_path = {part.path: part for part in parts}

    def joined(part: Part) -> Stages | None:
        stages = part.policy.stages
        if not isinstance(stages, Stages) or not any(_under(part.path, name) in by_path for name in stages.lists):
            return stages
        pieces = [by_path.get(_under(part.path, name), name) for name in stages.lists]
        found = {f.name: [] if f.name == "blocks" else [*names_of(getattr(stages, f.name))] for f in fields(stages)}
        for place, piece in enumerate(pieces):
            if isinstance(piece, str):
                found["blocks"].append(piece)
                continue
            inner = joined(piece)
            if not isinstance(inner, Stages):
                rule = f"{type(piece.policy).__qualname__}.stages"
                what = "stages of the whole model name this part in blocks, but its own policy has no stages"
                todo = "give that policy stages, or name the part in another place than blocks"
                builder.report(where=piece.path, rule=rule, what=what, todo=todo)
                continue
            moved = inner.mapped(functools.partial(_under, piece.path.removeprefix(_prefix(part.path))))
            for name in found:
                first, last = name == "first" and place > 0, name == "last" and place < len(pieces) - 1
                found["between" if first or last else name] += names_of(getattr(moved, name))
        return replace(stages, **{name: tuple(names) for name, names in found.items()})

    return joined(parts[0])


def _prefix(path: str) -> str:
    return f"{path}." if path else ""


def _under(path: str, name: str) -> str:
    return f"{_prefix(path)}{name}"
