"""Finding what may draw random numbers inside a region."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType

import numpy as np
from torch import nn

from shardcore.nn.mixin import native_class

__all__ = ["DropoutSites", "is_dropout"]

# Functions and methods of torch that draw numbers.
# fmt: off
_RANDOM = frozenset({
    "alpha_dropout", "bernoulli", "bernoulli_", "cauchy_", "dropout", "dropout1d", "dropout2d", "dropout3d",
    "exponential_", "feature_alpha_dropout", "fractional_max_pool2d", "fractional_max_pool3d", "geometric_",
    "gumbel_softmax", "log_normal_", "multinomial", "normal", "normal_", "poisson", "rand", "rand_like", "randint",
    "randint_like", "randn", "randn_like", "random_", "randperm", "rrelu", "rrelu_", "rsample", "uniform_",
})
# fmt: on


class DropoutSites:
    """The places of some modules where numbers may be drawn while training.

    These are dropout modules, attributes that are named after dropout and are its probability, and other modules whose
    own forward names one of torch's random functions. Probabilities are read at each use, so a later change counts.
    Places that are not really in the region do no harm: the random stream is then forked without need.

    Args:
        trees: modules searched with all their submodules.
        blocks: modules of which only the attributes, their own forward, and the stochastic modules that they hold
            directly count.
        draws: which of torch's random functions the code of a class names, as far as it was looked at; what is found
            is added. For several that look at modules of the same classes.
    """

    def __init__(
        self,
        trees: Iterable[nn.Module] = (),
        blocks: Iterable[nn.Module] = (),
        draws: dict[type[nn.Module], frozenset[str]] | None = None,
    ) -> None:
        #: Modules, and their attributes that hold a probability.
        self.probabilities: list[tuple[nn.Module, str]] = []
        #: Modules that draw in their own way.
        self._others: list[nn.Module] = []
        self._draws = {} if draws is None else draws
        for tree in trees:
            for module in tree.modules():
                self._add(module)
        for block in blocks:
            self._add(block)
            for child in block.children():
                if is_dropout(child) or self._draws_numbers(child):
                    self._add(child)

    def _add(self, module: nn.Module) -> None:
        names = [name for name, value in vars(module).items() if "drop" in name.lower() and _is_probability(value)]
        if is_dropout(module):
            names += [name for name in ("p", "drop_prob") if _is_probability(getattr(module, name, None))]
        new = [(module, name) for name in dict.fromkeys(names) if (module, name) not in self.probabilities]
        self.probabilities += new
        if not names and self._draws_numbers(module) and all(module is not other for other in self._others):
            self._others.append(module)

    def _draws_numbers(self, module: nn.Module) -> bool:
        native = native_class(type(module))
        if native not in self._draws:
            self._draws[native] = _RANDOM & {name for code in _codes(native) for name in code.co_names}
        if not self._draws[native]:
            return False
        own = {*vars(module), *module._modules}  # self.dropout(x) calls a module that is found by itself
        return bool(self._draws[native] - own)

    def __len__(self) -> int:
        return len(self.probabilities) + len(self._others)

    def live(self) -> bool:
        """Tell whether numbers would be drawn at one of the places now."""
        for module, name in self.probabilities:
            if module.training and getattr(module, name):
                return True
        return any(module.training for module in self._others) if self._others else False


def _codes(cls: type[nn.Module]) -> Iterator[CodeType]:
    """Yield the code of the forward of ``cls``, and of the methods and functions of its file that the code names."""
    methods = {name: value for base in reversed(cls.__mro__) for name, value in vars(base).items()}
    waiting: list[object] = [methods["forward"]]
    seen: set[FunctionType] = set()
    while waiting:
        function = waiting.pop()
        if not isinstance(function, FunctionType) or function in seen:
            continue
        seen.add(function)
        waiting.append(getattr(function, "__wrapped__", None))
        for code in _nested(function.__code__):
            if any(function.__globals__.get(name) is np for name in code.co_names):
                continue  # numpy draws from generators of its own
            yield code
            waiting += [methods[name] for name in code.co_names if name in methods]
            waiting += [
                found
                for name in code.co_names
                if getattr(found := function.__globals__.get(name), "__module__", None) == cls.__module__
            ]


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def is_dropout(module: nn.Module) -> bool:
    """Tell whether a module is named after dropout."""
    return "drop" in type(module).__name__.lower()


def _is_probability(value: object) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool))
