"""The word for methods besides ``forward`` that run a module."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from typing_extensions import override

from shardcore.plan.steps import CallByMethods
from shardcore.policy import Rule, Scope
from shardcore.styles._text import written

__all__ = ["calls"]


def calls(*methods: str) -> Rule:
    """Methods besides ``forward`` that users call to run the module (``forward_features``, ``get_image_features``).

    They are methods of the module that the rule is listed under, and may call each other and ``forward``. While one
    runs, everything is as in a forward: the model's random stream is in use, the module's own replicated parameters are
    local tensors, and FSDP2 has gathered them.
    """
    return CallsRule(text=written("calls", *methods), methods=methods)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallsRule(Rule):
    """`shardcore.styles.calls`."""

    methods: tuple[str, ...]

    @override
    def plan(self, scope: Scope) -> None:
        kind = type(scope.module)
        missing = [name for name in self.methods if not inspect.isfunction(getattr(kind, name, None))]
        own = [name for name in self.methods if name in vars(scope.module)]
        if missing:
            scope.problem(f"{kind.__name__} has no method {', '.join(missing)}", "correct the names")
        elif own:
            what = f"this {kind.__name__} has {', '.join(own)} on the instance, which would be called in its place"
            scope.problem(what, "set it on a subclass, or after shard()")
        else:
            scope.add(CallByMethods(path=scope.name(""), methods=self.methods))
