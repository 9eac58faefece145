"""Shardformer's descriptions, which yield the rules that say the same: both ways of writing compile to one plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from typing_extensions import override

from shardcore.nn import ParallelMixin, ParallelModule
from shardcore.policy import Rule, Scope
from shardcore.styles import attribute
from shardcore_shardformer.steps import ReplaceMethods, ReplaceModule, ReplaceParameters

#: Options of Shardformer's layers -> their values that ask for nothing, or for what every layer does here.
_NOTHING: dict[str, tuple[Any, ...]] = {
    "seq_parallel_mode": (None,),
    "seq_parallel_dim": (None, 1),
    "overlap": (None, False),
    "fp8_communication": (None, False),
    "gather_output": (False,),
    "skip_bias_add": (None, False),
    "stream_chunk_num": (None, 1),
    "make_vocab_size_divisible_by": (None, 1),
    "split_sizes": (None,),
    "use_zbv": (None, False, True),
}


@dataclass
class SubModuleReplacementDescription:
    """A submodule to be replaced, as in Shardformer.

    Attributes:
        suffix: the name of the submodule relative to the module it is described under.
        target_module: the `ParallelModule` class that replaces it.
        kwargs: further arguments of ``target_module.from_native_module``.
        ignore_if_not_exist: do nothing where the submodule is absent.
    """

    suffix: str
    target_module: type[ParallelModule]
    kwargs: dict[str, Any] | None = None
    ignore_if_not_exist: bool = False


@dataclass
class ModulePolicyDescription:
    """What is replaced in each module of one class, as in Shardformer.

    Attributes:
        attribute_replacement: new values by attribute name (dots reach into submodules); the attributes must exist.
        param_replacement: functions called with (module, process_group) that replace parameters of the module in place.
        sub_module_replacement: the submodules to be replaced.
        method_replacement: new methods by name; they apply to this model's instances only.
    """

    attribute_replacement: dict[str, Any] | None = None
    param_replacement: list[Callable[..., Any]] | None = None
    sub_module_replacement: list[SubModuleReplacementDescription] | None = None
    method_replacement: dict[str, Callable[..., Any]] | None = None

    def __iter__(self) -> Iterator[Rule]:
        """Yield the rules that say the same."""
        for name, value in (self.attribute_replacement or {}).items():
            yield attribute(name, value, literal=True)
        yield from map(_SubModuleRule.of, self.sub_module_replacement or ())
        yield from map(_ParametersRule.of, self.param_replacement or ())
        if self.method_replacement:
            yield _MethodsRule.of(self.method_replacement)


@dataclass(frozen=True, slots=True, kw_only=True)
class _SubModuleRule(Rule):
    suffix: str
    target: type[ParallelModule]
    options: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, item: SubModuleReplacementDescription) -> _SubModuleRule:
        text = f"SubModuleReplacementDescription({item.suffix!r}, {item.target_module.__name__})"
        known = item.target_module.option_names if issubclass(item.target_module, ParallelMixin) else None
        options = {
            name: value
            for name, value in (item.kwargs or {}).items()
            if known is None or name in known or not _asks_for_nothing(name, value)
        }
        return cls(
            text=text,
            optional=item.ignore_if_not_exist,
            suffix=item.suffix,
            target=item.target_module,
            options=tuple(sorted(options.items())),
        )

    @override
    def plan(self, scope: Scope) -> None:
        """Add the replacement to the plan, or what is wrong with it."""
        module = scope.find(self.suffix)
        if module is None:
            return
        if issubclass(self.target, ParallelMixin):
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
        """Add the replacement to the plan, or what is wrong with it."""
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
        """Add the replacement to the plan, or what is wrong with it."""
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


def _asks_for_nothing(name: str, value: Any) -> bool:
    return any(value is nothing or (type(value) is int and value == nothing) for nothing in _NOTHING.get(name, ()))
