"""Shardformer's descriptions as rules, so that both ways of writing a policy compile to the same plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from typing_extensions import override

from shardcore.nn import ParallelModule, SwappedModule
from shardcore.plan.steps import ReplaceMethods, ReplaceModule, ReplaceParameters
from shardcore.policy import ModulePolicyDescription, Rule, Scope, SubModuleReplacementDescription
from shardcore.styles import attribute

__all__ = ["rules_of"]


def rules_of(description: ModulePolicyDescription) -> list[Rule]:
    """Return the rules that say the same as ``description``."""
    rules: list[Rule] = [
        attribute(name, value, literal=True) for name, value in (description.attribute_replacement or {}).items()
    ]
    rules += [_SubModuleRule.of(item) for item in description.sub_module_replacement or ()]
    rules += [_ParametersRule.of(function) for function in description.param_replacement or ()]
    if description.method_replacement:
        rules.append(_MethodsRule.of(description.method_replacement))
    return rules


@dataclass(frozen=True, slots=True, kw_only=True)
class _SubModuleRule(Rule):
    suffix: str
    target: type[ParallelModule]
    options: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, item: SubModuleReplacementDescription) -> _SubModuleRule:
        text = f"SubModuleReplacementDescription({item.suffix!r}, {item.target_module.__name__})"
        options = item.kwargs or {}
        if issubclass(item.target_module, SwappedModule):
            options = item.target_module.without_planned(options)
        return cls(
            text=text,
            optional=item.ignore_if_not_exist,
            suffix=item.suffix,
            target=item.target_module,
            options=tuple(sorted(options.items())),
        )

    @override
    def plan(self, scope: Scope) -> None:
        module = scope.find(self.suffix)
        if module is None:
            return
        if issubclass(self.target, SwappedModule):
            scope.swap(self.suffix, self.target, **dict(self.options))
            return
        _claim_all(scope, self.suffix, module)
        scope.add(ReplaceModule(path=scope.name(self.suffix), target=self.target, options=self.options))


@dataclass(frozen=True, slots=True, kw_only=True)
class _ParametersRule(Rule):
    function: Callable[..., Any]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> _ParametersRule:
        return cls(text=f"param_replacement {getattr(function, '__qualname__', function)}", function=function)

    @override
    def plan(self, scope: Scope) -> None:
        for name, parameter in scope.module._parameters.items():
            if parameter is not None:
                scope.claim("", name, None)
        scope.add(ReplaceParameters(path=scope.name(""), function=self.function))


@dataclass(frozen=True, slots=True, kw_only=True)
class _MethodsRule(Rule):
    methods: tuple[tuple[str, Callable[..., Any]], ...]

    @classmethod
    def of(cls, methods: dict[str, Callable[..., Any]]) -> _MethodsRule:
        return cls(text=f"method_replacement {sorted(methods)}", methods=tuple(sorted(methods.items())))

    @override
    def plan(self, scope: Scope) -> None:
        for name, _ in self.methods:
            if not callable(getattr(type(scope.module), name, None)):
                scope.problem(
                    f"{type(scope.module).__name__} has no method {name!r}; a new one would never be called",
                    "name a method that this version of the model has",
                )
        scope.add(ReplaceMethods(path=scope.name(""), methods=self.methods))


def _claim_all(scope: Scope, suffix: str, module: nn.Module) -> None:
    for below, submodule in module.named_modules():
        for name, parameter in submodule._parameters.items():
            if parameter is not None:
                scope.claim(".".join(filter(None, (suffix, below))), name, None)
