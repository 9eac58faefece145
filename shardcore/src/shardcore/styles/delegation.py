"""The word for submodules that are models of another family."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from shardcore.policy import Policy, Rule, Scope
from shardcore.styles._text import written

__all__ = ["DelegateRule", "delegate"]


def delegate(name: str, *, policy: Policy | type[Policy] | None = None, optional: bool = False) -> Rule:
    """Leave a submodule that is a model of another family to the policy for its class: a vision tower, a decoder.

    That policy is planned for the submodule as if it were the whole model: its checks and heads go by the submodule's
    own configuration, its rules apply in the submodule alone, and no rule of this policy applies there. What the
    submodule does as a model (`generate`, saving) it does by that policy too. In ``stages`` of this policy, ``blocks``
    names the submodule where its blocks run, and its own stages are put there.

    Args:
        name: the submodule.
        policy: its policy or the class of it; None looks for the installed pack that serves the class of the submodule.
        optional: it may be absent.
    """
    shown = getattr(policy, "__qualname__", type(policy).__qualname__) if policy is not None else None
    return DelegateRule(text=written("delegate", name, policy=shown), optional=optional, name=name, policy=policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class DelegateRule(Rule):
    """`shardcore.styles.delegate`."""

    name: str
    policy: Policy | type[Policy] | None = None

    @override
    def plan(self, scope: Scope) -> None:
        """Nothing is left to plan: whose rules apply where is found out before any rule is planned."""
