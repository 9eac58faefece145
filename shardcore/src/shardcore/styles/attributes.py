"""The word for attributes that hold a size of which a rank has only a part."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from typing_extensions import override

from shardcore.plan.steps import SetAttribute
from shardcore.policy import HeadCounts, Rule, Scope

__all__ = ["attribute", "local_groups", "local_heads", "per_rank"]


def attribute(name: str, value: Any, *, optional: bool = False, literal: bool = False) -> Rule:
    """Set an attribute (dots reach into submodules) to its value for one rank.

    Args:
        name: the attribute; it must exist.
        value: the new value, `per_rank` for this rank's part of the old one, or a function of the `HeadCounts` such as
            `local_heads`.
        optional: the submodule may be absent.
        literal: True sets a function as the value instead of calling it.
    """
    shown = value.__name__ if inspect.isfunction(value) else repr(value)
    text = f"attribute({name!r}, {shown})"
    return AttributeRule(text=text, optional=optional, name=name, value=value, literal=literal)


def per_rank(value: int, ranks: int) -> int:
    """A number divided by the number of ranks, which has to divide it; as the value of an `attribute`."""
    return value // ranks


def local_heads(heads: HeadCounts) -> int:
    """Query heads of one rank."""
    return heads.local_query


def local_groups(heads: HeadCounts) -> int:
    """Query heads of one rank for each KV head that it uses."""
    return heads.local_query // heads.local_kv


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributeRule(Rule):
    """`shardcore.styles.attribute`."""

    name: str
    value: Any | Callable[[HeadCounts], Any]
    literal: bool = False

    @override
    def plan(self, scope: Scope) -> None:
        owner, _, name = self.name.rpartition(".")
        module = scope.find(owner)
        if module is None:
            return
        if not hasattr(module, name):
            scope.problem(
                f"{type(module).__name__} has no attribute {name!r}; setting it would create one that nothing reads",
                "remove the rule, or name the attribute that this version of the model uses",
                owner,
            )
            return
        value = self.value
        if value is per_rank:
            whole = getattr(module, name)
            if not isinstance(whole, Integral) or isinstance(whole, bool):
                scope.problem(
                    f"{type(module).__name__}.{name} is a {type(whole).__name__}; per_rank divides a whole number",
                    "name the attribute that counts, or give the value of one rank in place of per_rank",
                    owner,
                )
                return
            count = int(whole)
            if count % scope.ranks:
                scope.problem(
                    f"{type(module).__name__}.{name} is {count}, which {scope.ranks} ranks do not divide",
                    "use a tensor_parallel_size that divides it",
                    owner,
                )
                return
            value = per_rank(count, scope.ranks)
        elif inspect.isfunction(value) and not self.literal:
            if scope.heads is None:
                return
            value = value(scope.heads)
        scope.add(SetAttribute(path=scope.name(owner), name=name, value=value))
