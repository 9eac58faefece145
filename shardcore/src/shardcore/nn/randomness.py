"""What draws random numbers inside a region, and modules that draw the same ones on all ranks there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import nn
from typing_extensions import override

from shardcore._torch import backward_task
from shardcore.errors import NotSupportedError
from shardcore.mesh.context import ShardContext
from shardcore.nn.base import ParallelMixin, with_methods
from shardcore.nn.mixin import native_class, once

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


class SharedRandom(ParallelMixin):
    """A module that draws the same random numbers on all ranks, inside of regions too.

    For draws that decide about whole samples (stochastic depth): ranks that decide differently would add parts of
    different networks.
    """

    keeps_name: ClassVar[bool] = True

    _shard_context: ShardContext

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the native forward on the shared stream."""
        if torch.compiler.is_compiling():
            return super().forward(*args, **kwargs)
        with self._shard_context.random.shared():
            return super().forward(*args, **kwargs)


class SharedNumpy(ParallelMixin):
    """A module with methods that draw from numpy's global generator: the same numbers on all ranks.

    The generator is seeded from the model's random stream before each call, and set back to the user's state after it.

    Options:
        methods: the names of these methods.
    """

    keeps_name: ClassVar[bool] = True
    option_names: ClassVar[frozenset[str]] = frozenset({"methods"})

    _shard_context: ShardContext

    @classmethod
    @override
    def problem(cls, module: nn.Module, ranks: int, *, methods: tuple[str, ...] = (), **options: Any) -> str | None:
        missing = [name for name in methods if not callable(getattr(type(module), name, None))]
        return f"{type(module).__name__} has no method {', '.join(missing)}" if missing else None

    @classmethod
    @override
    def swap_class(
        cls, module: nn.Module, context: ShardContext, *, methods: tuple[str, ...] = (), **options: Any
    ) -> Self:
        new = super().swap_class(module, context)
        with_methods(new, {name: _seeded(getattr(type(new), name)) for name in methods})
        return new


@once
def _seeded(native: Callable[..., Any]) -> Callable[..., Any]:
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # untyped in torch
    def draw(self: Any, *args: Any, **kwargs: Any) -> Any:
        random = self._shard_context.random
        random.enter()
        try:
            with random.shared():
                return _drawing(native, self, *args, **kwargs)
        finally:
            random.leave()

    @functools.wraps(native)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and not self.training:
            return native(self, *args, **kwargs)
        return draw(self, *args, **kwargs)

    return method


def _drawing(native: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call ``native`` with numpy seeded from torch's generator, which moves on only if numpy's was used.

    Numbers that are drawn again in a backward, where the stream has moved on, are refused.
    """
    ahead = torch.Generator("cpu")  # whatever the default device is
    ahead.set_state(torch.default_generator.get_state())
    users = np.random.get_state()
    np.random.seed(int(torch.randint(1 << 32, (), generator=ahead, device="cpu").item()))
    fresh = _numpy_state()
    try:
        result = native(module, *args, **kwargs)
        used = _numpy_state() != fresh
    finally:
        np.random.set_state(users)
    if used and backward_task() != -1:  # no public way to ask whether a backward is running
        raise NotSupportedError(
            f"a checkpoint around the whole {type(module).__name__} recomputes it with other random numbers than "
            f"{native.__name__} drew before. Checkpoint its blocks instead (model.gradient_checkpointing_enable())."
        )
    if used:
        torch.randint(1 << 32, (), device="cpu")
    return result


def _numpy_state() -> tuple[Any, ...]:
    state: Any = np.random.get_state()
    _, keys, *rest = state
    return (keys.tobytes(), *rest)
