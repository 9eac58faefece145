"""The word for attributes that hold a size of which a rank has only a part."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from torch import nn
from typing_extensions import override

from shardcore.plan.steps import ByRank, SetAttribute
from shardcore.policy import HeadCounts, Rule, Scope
from shardcore.styles._finding import submodule

__all__ = ["attribute", "local_groups", "local_heads", "local_kv_heads", "per_rank"]


def attribute(name: str, value: Any, *, optional: bool = False, literal: bool = False) -> Rule:
    """Set an attribute (dots reach into submodules) to its value for one rank.

    Args:
        name: the attribute; it must exist. One of an object that the module holds, such as
            ``"self_attn.config.num_attention_heads"``, is set on a view of that object which is the module's own: other
            modules, and what is saved, keep the value of the whole model.
        value: the new value, `per_rank` for this rank's part of the old one, or a function of the `HeadCounts` such as
            `local_heads`. Where the ranks do not divide the heads, `per_rank` is for numbers of heads, and for numbers
            that each head has equally many of.
        optional: the submodule may be absent, or be of another kind that has no such attribute.
        literal: True sets a function as the value instead of calling it.
    """
    shown = value.__name__ if inspect.isfunction(value) else repr(value)
    text = f"attribute({name!r}, {shown})"
    return AttributeRule(text=text, optional=optional, name=name, value=value, literal=literal)


def per_rank(value: int, ranks: int) -> int:
    """A number divided by the number of ranks; as the value of an `attribute`."""
    return value // ranks


def local_heads(heads: HeadCounts) -> int:
    """Query heads of one rank."""
    return heads.local_query


def local_kv_heads(heads: HeadCounts) -> int:
    """KV heads that one rank uses; where ranks have parts of groups, some count several times."""
    return heads.local_kv


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
        found = self._holder(scope)
        if found is None:
            return
        owner, holder, name = found
        module = scope.module.get_submodule(owner)
        whole = getattr(getattr(module, holder) if holder else module, name)
        value = self.value
        if value is per_rank:
            value = self._part(scope, owner, whole)
            if value is None:
                return
        elif inspect.isfunction(value) and not self.literal:
            if scope.heads is None:
                return
            value = ByRank.of([value(scope.heads.at(rank)) for rank in range(scope.ranks)])
        scope.add(SetAttribute(path=scope.name(owner), name=".".join(filter(None, (holder, name))), value=value))

    def _holder(self, scope: Scope) -> tuple[str, str, str] | None:
        """Return the module, what it holds if that has the attribute, and the attribute; record what is absent."""
        owner, _, name = self.name.rpartition(".")
        above, _, holder = owner.rpartition(".")
        held = getattr(submodule(scope.module, above), holder, None) if holder else None
        if held is not None and not isinstance(held, nn.Module):
            module, owner, where = held, above, f"{type(held).__name__} ({owner})"
        else:
            module, holder = scope.find(owner), ""
            where = type(module).__name__
        if module is None or (self.optional and not hasattr(module, name)):
            return None
        if not hasattr(module, name) or (holder and not hasattr(module, "__dict__")):
            scope.problem(
                f"{where} has no attribute {name!r}; setting it would create one that nothing reads",
                "remove the rule, or name the attribute that this version of the model uses",
                owner,
            )
            return None
        return owner, holder, name

    def _part(self, scope: Scope, owner: str, whole: Any) -> Any:
        """Return the value of `per_rank`, or record why there is none."""
        where = f"{type(scope.module.get_submodule(owner)).__name__}.{self.name.rpartition('.')[2]}"
        if not isinstance(whole, Integral) or isinstance(whole, bool):
            scope.problem(
                f"{where} is a {type(whole).__name__}; per_rank divides a whole number",
                "name the attribute that counts, or give the value of one rank in place of per_rank",
                owner,
            )
            return None
        count = int(whole)
        heads = scope.known_heads
        parts = None if heads is None or heads.is_even else _parts_by_heads(count, heads)
        if parts is not None:
            return ByRank.of(parts)
        if count % scope.ranks or (heads is not None and not heads.is_even):
            scope.problem(
                f"{where} is {count}, which {scope.ranks} ranks do not divide"
                if count % scope.ranks
                else f"{where} is {count}, which {scope.ranks} ranks divide, but not the {heads.query if heads else 0} "
                "heads",
                "use a tensor_parallel_size that divides it, or give a function of the HeadCounts in place of per_rank",
                owner,
            )
            return None
        return per_rank(count, scope.ranks)


def _parts_by_heads(count: int, heads: HeadCounts) -> list[int] | None:
    """Return each rank's part of a number of heads, or of what heads have equally many of; None if it is neither."""
    ranks = [heads.at(rank) for rank in range(heads.ranks)]
    if count % heads.query == 0:
        return [count // heads.query * own.local_query for own in ranks]
    return [own.local_kv for own in ranks] if count == heads.kv else None
