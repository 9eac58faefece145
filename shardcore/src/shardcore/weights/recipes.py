"""Recipes: how the values of a tensor come about, told as data, so that a part of it can be made without the rest.

A recipe is immutable; what is done to a tensor in place makes a new one. `evaluate` makes the full tensor, and `Reader`
any box of it: where only views, copies, casts and joins lie between a file and the box, nothing else is read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map
from typing_extensions import override

#: A part of a tensor: (start, stop) along every dim.
Box = tuple[tuple[int, int], ...]


def whole_box(shape: Sequence[int]) -> Box:
    """Return the box that is all of a tensor of ``shape``."""
    return tuple((0, size) for size in shape)


def slices(box: Box) -> tuple[slice, ...]:
    """Return ``box`` as indices."""
    return tuple(slice(start, stop) for start, stop in box)


class Node(ABC):
    """A step on the way to the values of a tensor."""

    __slots__ = ()

    @property
    def inputs(self) -> tuple[Node, ...]:
        """What it needs the values of."""
        return ()

    @abstractmethod
    def compute(self, values: Sequence[Any], *, may_write: bool) -> Any:
        """Return the values, from those of `inputs`; ``may_write`` allows to change the first of them."""


@dataclass(frozen=True, slots=True, eq=False)
class Recipe(Node):
    """How the values of one tensor come about."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class Source(Recipe):
    """A tensor that is there and can be read box by box, such as one of a file."""

    #: Returns a box of it, which may be a view of memory that others read too.
    read: Callable[[Box], Tensor]
    #: Returns a box of it as a view of a file that this process has mapped for itself: it can be kept, and written to,
    #: and takes no memory until it is looked at. None where there is no such file.
    keep: Callable[[Box], Tensor] | None = None

    @override
    def compute(self, values: Sequence[Any], *, may_write: bool) -> Tensor:
        return self.read(whole_box(self.shape))


def constant(tensor: Tensor) -> Source:
    """Return the recipe of a tensor that is there."""
    return Source(tuple(tensor.shape), tensor.dtype, lambda box: tensor[slices(box)])


@dataclass(frozen=True, slots=True, eq=False)
class Call(Node):
    """A call of a function of torch; among its arguments a `Hole` stands for a tensor."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    #: In the order of the holes; without the first one where that is another each time.
    tensors: tuple[Recipe, ...] = ()
    seed: int | None = None  # what the generator of the CPU is seeded with before it, if it draws numbers
    #: The default dtype of the code that made the call, in which torch divides integers, for one.
    default: torch.dtype = field(default_factory=torch.get_default_dtype)

    @property
    @override
    def inputs(self) -> tuple[Recipe, ...]:
        return self.tensors

    @override
    def compute(self, values: Sequence[Any], *, may_write: bool = False) -> Any:
        args, kwargs = tree_map(
            lambda leaf: values[leaf.at] if isinstance(leaf, Hole) else leaf, (self.args, self.kwargs)
        )
        with _default_dtype(self.default):
            if self.seed is None:
                return self.function(*args, **kwargs)
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(self.seed)
                return self.function(*args, **kwargs)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    if dtype is before:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@dataclass(frozen=True, slots=True)
class Hole:
    """The place of a tensor among arguments."""

    at: int  # its number among the tensors of the call


@dataclass(frozen=True, slots=True, eq=False)
class Result(Recipe):
    """One tensor that a function returns."""

    of: Call
    at: int | None  # which of its results; None if it returns one tensor
    #: It shares memory with the first tensor of the call, which may be left open as `LazyTensor` keeps it.
    is_view: bool = False

    @property
    @override
    def inputs(self) -> tuple[Call]:
        return (self.of,)

    @override
    def compute(self, values: Sequence[Any], *, may_write: bool) -> Tensor:
        out: Tensor = values[0] if self.at is None else values[0][self.at]
        return out


@dataclass(frozen=True, slots=True, eq=False)
class Mutated(Recipe):
    """A tensor after a function has written to it, or to a view of it."""

    base: Recipe  # the tensor before
    #: What leads from the tensor to the one that the function is given; the call of each takes that before it.
    views: tuple[Result, ...]
    call: Call  # of the function, whose hole 0 is the tensor that it writes to

    @property
    @override
    def inputs(self) -> tuple[Recipe, ...]:
        return (self.base, *self.call.tensors)

    @override
    def compute(self, values: Sequence[Any], *, may_write: bool) -> Tensor:
        base: Tensor = values[0] if may_write else values[0].clone(memory_format=torch.preserve_format)
        target = base
        for view in self.views:
            target = view.compute([view.of.compute([target])], may_write=False)
        self.call.compute([target, *values[1:]])
        return base


def evaluate(recipe: Recipe) -> Tensor:
    """Return the full tensor; what it is made from is given up as soon as nothing needs it any more."""
    order = list(_in_order(recipe))
    uses = Counter(id(part) for node in order for part in node.inputs)
    values: dict[int, Any] = {}
    nobody_else: dict[int, bool] = {}
    with torch.no_grad(), _disable_current_modes():
        for node in order:
            values[id(node)], nobody_else[id(node)] = _computed(node, uses, values, nobody_else)
            for part in node.inputs:
                uses[id(part)] -= 1
            for part in node.inputs:
                if uses[id(part)] == 0:
                    values.pop(id(part), None)
    result: Tensor = values[id(recipe)]
    return result


def _computed(node: Node, uses: Counter[int], values: dict[int, Any], nobody_else: dict[int, bool]) -> tuple[Any, bool]:
    """Return the value of ``node``, and whether no other value shares its memory."""
    given = [values[id(part)] for part in node.inputs]
    first = node.inputs[0] if node.inputs else None
    sole = first is not None and uses[id(first)] == 1 and nobody_else[id(first)]
    value = node.compute(given, may_write=sole and isinstance(node, Mutated))
    if isinstance(node, Result) and first is not None:
        # A view keeps its base from being written to as long as both are used; so does one result the others.
        base = node.of.tensors[0] if node.is_view and node.of.tensors else None
        if base is not None:
            nobody_else[id(base)] = False
        return value, base is None and sole
    return value, not isinstance(node, Source)


def _in_order(recipe: Node) -> Iterator[Node]:
    """Yield what ``recipe`` needs, each once and after what it needs itself; no recursion, as chains may be long."""
    seen: set[int] = set()
    stack: list[tuple[Node, bool]] = [(recipe, False)]
    while stack:
        node, ready = stack.pop()
        if ready:
            yield node
        elif id(node) not in seen:
            seen.add(id(node))
            stack.append((node, True))
            stack.extend((part, False) for part in node.inputs if id(part) not in seen)
