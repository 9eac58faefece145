"""Tensors that have no values yet: `LazyTensor` carries a recipe, and `recording` makes them where tensors are made.

The idea is that of deferred initialisation (torchdistX) and of ColossalAI's LazyTensor: code that builds and fills a
model runs as it is, but no memory is touched; what it would have done is told by recipes, and done later for the parts
that are needed. Code that wants to see values (``if x.any()``, ``x.item()``) gets them, made at that moment.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from shardcore.weights.recipes import Call, Hole, Mutated, Recipe, Result, constant, evaluate

_aten: Any = torch.ops.aten

#: Functions after which nothing is left of what was in the tensor before.
_OVERWRITE = frozenset(
    {
        _aten.copy_.default,
        _aten.fill_.Scalar,
        _aten.fill_.Tensor,
        _aten.normal_.default,
        _aten.uniform_.default,
        _aten.zero_.default,
    }
)

#: Functions that return the tensor that they are given; each tensor is one of its own.
_SAME = frozenset({_aten.alias.default, _aten.detach.default})

#: Types of what calls take beside lazy tensors and whatever may hold them.
_PLAIN = frozenset({Tensor, nn.Parameter})
_PLAIN_VALUES = frozenset({int, float, bool, type(None), torch.dtype, torch.layout, torch.memory_format})


@dataclass(slots=True)
class _Memory:
    """What a lazy tensor and its views share: the recipe of the values that are there now."""

    recipe: Recipe


@dataclass(slots=True)
class Seeds:
    """Seeds for the calls that draw: the n-th call gets the same one on every rank and mesh, and no other call does."""

    seed: int
    count: int = 0

    def next(self) -> int:
        """Return the seed of the next call."""
        self.count += 1
        return int.from_bytes(hashlib.sha256(f"{self.seed}/{self.count}".encode()).digest()[:7])


class LazyTensor(Tensor):
    """A tensor that is known by a recipe; from outside it looks like one on its device."""

    # No attributes in the dict: libraries copy that of parameters.
    __slots__ = ("_like", "_memory", "_seeds", "_views")

    _memory: _Memory
    _views: tuple[Result, ...]  # each of the one before it, the first of the memory
    _like: Tensor  # on the meta device; shares memory there as the tensor will
    _seeds: Seeds

    def __new__(cls, data: Tensor, requires_grad: bool = True, **attributes: Any) -> Any:
        """Return a parameter with ``data``: libraries make one anew by calling the type of another."""
        return nn.Parameter(data, requires_grad=requires_grad)

    @classmethod
    def made(
        cls, like: Tensor, device: torch.device, memory: _Memory, seeds: Seeds, views: tuple[Result, ...] = ()
    ) -> LazyTensor:
        """Return a tensor with the form of ``like``, a view of ``memory``."""
        new: LazyTensor = Tensor._make_wrapper_subclass(
            cls,
            like.shape,
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            layout=like.layout,
            device=device,
        )
        new._memory, new._views, new._like, new._seeds = memory, views, like, seeds
        return new

    @classmethod
    def of(cls, recipe: Recipe) -> LazyTensor:
        """Return a tensor on the CPU that will have the values of ``recipe``."""
        like = torch.empty(recipe.shape, dtype=recipe.dtype, device="meta")
        return cls.made(like, torch.device("cpu"), _Memory(recipe), Seeds(0))

    @property
    def recipe(self) -> Recipe:
        """How the values that it has now come about."""
        recipe = self._memory.recipe
        for view in self._views:
            recipe = replace(view, of=replace(view.of, tensors=(recipe,)))
        return recipe

    def evaluate(self) -> Tensor:
        """Return the values, on the CPU."""
        return evaluate(self.recipe)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # untyped in torch
        return f"LazyTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    # A tensor that is assigned through `data` has to bring its recipe along.

    @property
    def data(self) -> Tensor:
        """The tensor without its history of gradients."""
        return self.detach()

    @data.setter
    def data(self, other: Tensor) -> None:
        if not isinstance(other, LazyTensor):
            raise RuntimeError("only another tensor without values can be assigned to the data of one")
        Tensor.data.__set__(self, other)  # type: ignore[attr-defined]  # it is a descriptor, not in the stubs
        self._memory, self._views, self._like, self._seeds = other._memory, other._views, other._like, other._seeds

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array."""
        return self.evaluate().numpy(force=force)

    def tolist(self) -> Any:
        """Return the values as numbers."""
        return self.evaluate().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = self.detach().clone()
        new = nn.Parameter(copied, requires_grad=self.requires_grad) if isinstance(self, nn.Parameter) else copied
        memo[id(self)] = new
        return new

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types its placeholder, not what it calls
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        if func in _SAME and (same := _same(args[0])) is not None:
            return same
        return _record(func, args, dict(kwargs or {}), None)


def _same(tensor: Any) -> LazyTensor | None:
    """Return a second tensor for the memory of a lazy one; None for other tensors.

    What `_record` does with the functions of `_SAME`, without the search for what they take and write.
    """
    if type(tensor) is not LazyTensor:
        return None
    with _disable_current_modes():
        like = tensor._like.detach()
        detached = Call(_aten.detach.default, (Hole(0),), {})
        views = (*tensor._views, Result(tuple(like.shape), like.dtype, detached, None, is_view=True))
        return LazyTensor.made(like, tensor.device, tensor._memory, tensor._seeds, views)


class _Recording(TorchDispatchMode):
    """Makes lazy tensors where tensors are made, but for those on the meta device."""

    def __init__(self, seeds: Seeds) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.seeds = seeds

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        if func in _SAME and (same := _same(args[0])) is not None:
            return same
        kwargs = dict(kwargs or {})
        if _is_on_meta(args, kwargs):
            # What is written to a tensor without values is not kept by anything.
            return args[0] if func in _OVERWRITE else func(*args, **kwargs)
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        if any(isinstance(tensor, LazyTensor) for tensor in tensors) or _makes_values(func, tensors, kwargs):
            return _record(func, args, kwargs, self.seeds)
        return func(*args, **kwargs)


@contextmanager
def recording(seed: int) -> Iterator[Seeds]:
    """Make every tensor that is made in here, but on the meta device, a lazy one.

    The same ``seed`` and the same code give the same random values everywhere.
    """
    seeds = Seeds(seed)
    with _Recording(seeds):
        yield seeds


def _makes_values(func: Any, tensors: Sequence[Tensor], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether ``func`` makes a tensor with values of its own, off the meta device."""
    if not _takes_device(func) or func is _aten._to_copy.default:
        return False
    given = kwargs.get("device")
    device = torch.device(given) if given is not None else tensors[0].device if tensors else torch.device("cpu")
    # Functions that are given a real tensor (zeros_like and its kin) make small ones, which may be looked at.
    return device.type != "meta" and (not tensors or tensors[0].is_meta)


def _is_on_meta(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Tell at a glance whether a call works on the meta device, as most calls that build a model do."""
    found = False
    for value in (*args, *kwargs.values()):
        kind = type(value)
        if kind in _PLAIN or kind is torch.device:
            if (value if kind is torch.device else value.device).type != "meta":
                return False
            found = True
        elif kind is list:
            if any(type(item) is not int for item in value):
                return False
        elif kind not in _PLAIN_VALUES:
            return False
    return found


def _takes_device(func: Any) -> bool:
    return any(argument.name == "device" for argument in func._schema.arguments)


def _record(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], seeds: Seeds | None) -> Any:
    """Return what a call returns, without values where they are not needed now."""
    with _disable_current_modes():
        step = _Step(func, args, kwargs, seeds)
        if not all(isinstance(tensor, LazyTensor) for tensor in step.written):
            # What is written to is real, or has no values and never will.
            known = _likes if any(tensor.is_meta for tensor in step.written) else _values
            return func(*known(args), **known(kwargs))
        try:
            out = func(*_likes(args), **_likes(kwargs), **({"device": "meta"} if _takes_device(func) else {}))
        except (NotImplementedError, RuntimeError):
            out = None  # it depends on values, or is wrong, and says so when it gets them
        if not any(isinstance(leaf, Tensor) for leaf in tree_flatten(out)[0]):
            return func(*_values(args), **_values(kwargs))
        return step.results(out)


class _Step:
    """One call that is recorded."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], seeds: Seeds | None) -> None:
        self.func = func
        self.leaves, self.form = tree_flatten((args, kwargs))
        self.tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        self.seeds = seeds or next(t._seeds for t in self.tensors if isinstance(t, LazyTensor))
        self.written = _written(func, args, kwargs)
        given = kwargs.pop("device", None)
        others = (t.device for t in self.tensors if t.ndim or len(self.tensors) == 1)
        self.device = next(others, torch.device("cpu")) if given is None else torch.device(given)

    def results(self, out: Any) -> Any:
        """Return what the call returns, in the form of ``out``, and write what it writes."""
        if self.written:
            return self._write()
        if any(value.alias_info is not None for value in self.func._schema.returns):
            return self._view(out)
        if self.device.type == "meta":
            return out
        call = self._call()
        return _each(out, lambda like, at: self._new(like, Result(tuple(like.shape), like.dtype, call, at)))

    def _new(self, like: Tensor, recipe: Recipe) -> LazyTensor:
        return LazyTensor.made(like, self.device, _Memory(recipe), self.seeds)

    def _write(self) -> Any:
        (target,) = self.written if len(self.written) == 1 else (None,)
        if not isinstance(target, LazyTensor):
            raise NotImplementedError(f"{self.func} writes to several tensors at once, which cannot be recorded")
        if target.shape != target._like.shape or target.stride() != target._like.stride():
            raise NotImplementedError(f"{self.func} changes the form of a tensor in place, which cannot be recorded")
        call = self._call(target)
        base = target._memory.recipe
        if not target._views and self.func in _OVERWRITE and not any(t is target for t in self.tensors[1:]):
            blank = Call(_aten.empty_strided.default, (base.shape, target.stride()), {"dtype": base.dtype})
            base = Result(base.shape, base.dtype, blank, None)
        target._memory.recipe = Mutated(base.shape, base.dtype, base, target._views, call)
        return target

    def _view(self, out: Any) -> Any:
        base = self.tensors[0]
        if not isinstance(base, LazyTensor):
            return out
        call = self._call(base)

        def viewed(like: Tensor, at: int | None) -> LazyTensor:
            views = (*base._views, Result(tuple(like.shape), like.dtype, call, at, is_view=True))
            return LazyTensor.made(like, base.device, base._memory, self.seeds, views)

        return _each(out, viewed)

    def _call(self, first: Tensor | None = None) -> Call:
        """Return the call with holes for its tensors; ``first`` gets hole 0 and no recipe."""
        places: dict[int, int] = {} if first is None else {id(first): 0}
        recipes: list[Recipe] = []
        filled: list[Any] = []
        for leaf in self.leaves:
            if isinstance(leaf, Tensor) and id(leaf) not in places:
                places[id(leaf)] = len(places)
                recipes.append(leaf.recipe if isinstance(leaf, LazyTensor) else constant(leaf.detach().clone()))
            if isinstance(leaf, Tensor):
                filled.append(Hole(places[id(leaf)]))
            elif isinstance(leaf, torch.device):
                filled.append(torch.device("cpu"))
            elif isinstance(leaf, torch.Generator):
                filled.append(None)  # the seed of the call takes its place
            else:
                filled.append(leaf)
        args, kwargs = tree_unflatten(filled, self.form)
        kwargs.pop("pin_memory", None)
        draws = torch.Tag.nondeterministic_seeded in self.func.tags
        return Call(self.func, args, kwargs, tuple(recipes), self.seeds.next() if draws else None)


def _each(out: Any, make: Any) -> Any:
    """Return ``out``, one tensor or a sequence of them, with each replaced by ``make(tensor, number or None)``."""
    if isinstance(out, Tensor):
        return make(out, None)
    return type(out)(make(leaf, at) if isinstance(leaf, Tensor) else leaf for at, leaf in enumerate(out))


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that ``func`` writes to."""
    found: list[Tensor] = []
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[at] if at < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]
    return found


def _likes(tree: Any) -> Any:
    """Return ``tree`` with every tensor on the meta device; real ones of no dim are numbers, and stay."""

    def like(leaf: Any) -> Any:
        if isinstance(leaf, LazyTensor):
            return leaf._like
        if isinstance(leaf, Tensor) and not leaf.is_meta and leaf.ndim:
            return leaf.to("meta")
        return leaf

    return tree_map(like, tree)


def _values(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.evaluate() if isinstance(leaf, LazyTensor) else leaf, tree)
