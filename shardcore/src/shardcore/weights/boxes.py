"""Making a part of a tensor from parts of what it is made of.

Only what loaders do between a file and a parameter is followed: views, copies, casts and joins. Whatever else is in
between is made as a whole, once for each tensor, and the part is cut out of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from shardcore.weights.recipes import Box, Call, Hole, Mutated, Recipe, Result, Source, evaluate, slices

_aten: Any = torch.ops.aten


class Reader:
    """Makes boxes of the tensors of recipes; what had to be made as a whole is kept until the reader is given up."""

    def __init__(self) -> None:
        self._full: dict[int, tuple[Recipe, Tensor]] = {}  # with the recipe, so that no id is used twice
        self._keeps = False  # what is read is to be kept where it lies

    def read(self, recipe: Recipe, box: Box) -> Tensor:
        """Return the part ``box`` of the tensor; it may be a view of memory that nobody may write to."""
        with torch.no_grad(), _disable_current_modes():
            return self._read(recipe, box)

    def kept(self, recipe: Recipe, box: Box) -> Tensor | None:
        """Return the part ``box`` if it lies in one piece in a mapped file, where it can be kept; nothing is looked at.

        None if it lies elsewhere, in pieces, or in another dtype.
        """
        self._keeps = True
        try:
            with torch.no_grad(), _disable_current_modes():
                part = self._read(recipe, box)
        except _NotKeptError:
            return None
        finally:
            self._keeps = False
        return part if part.is_contiguous() else None

    def _read(self, recipe: Recipe, box: Box) -> Tensor:
        if id(recipe) in self._full:
            return self._full[id(recipe)][1][slices(box)]
        if isinstance(recipe, Source):
            if not self._keeps:
                return recipe.read(box)
            if recipe.keep is not None:
                return recipe.keep(box)
        followed = self._followed(recipe, box)
        if followed is not None:
            return followed
        self._look()
        return self._made(recipe)[slices(box)]

    def _look(self) -> None:
        """Say that values are needed now."""
        if self._keeps:
            raise _NotKeptError

    def _as(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        if part.dtype != dtype:
            self._look()
        return part.to(dtype)

    def _made(self, recipe: Recipe) -> Tensor:
        self._full[id(recipe)] = recipe, evaluate(recipe)
        return self._full[id(recipe)][1]

    def _followed(self, recipe: Recipe, box: Box) -> Tensor | None:
        if isinstance(recipe, Mutated):
            return self._overwritten(recipe, box)
        if not isinstance(recipe, Result):
            return None
        follow = _FOLLOWED.get(recipe.of.function)
        return None if follow is None else follow(self, recipe, box)

    def _overwritten(self, recipe: Mutated, box: Box) -> Tensor | None:
        """A whole tensor that another one was copied to."""
        if recipe.views or recipe.call.function is not _aten.copy_.default or len(recipe.call.tensors) != 1:
            return None
        (source,) = recipe.call.tensors
        return self._as(self._read(source, box), recipe.dtype) if source.shape == recipe.shape else None


class _NotKeptError(Exception):
    """A part has to be made."""


#: What makes a box of the result of a function; None where the function cannot be followed with these arguments.
_Follow = Callable[[Reader, Result, Box], Tensor | None]


def _argument(call: Call, at: int, name: str, default: Any) -> Any:
    return call.args[at] if len(call.args) > at else call.kwargs.get(name, default)


def _same(reader: Reader, recipe: Result, box: Box) -> Tensor | None:
    """A copy, or the same tensor again; its dtype may be another."""
    (source,) = recipe.of.tensors
    return reader._as(reader._read(source, box), recipe.dtype) if source.shape == recipe.shape else None


def _permuted(reader: Reader, recipe: Result, box: Box) -> Tensor | None:
    (source,) = recipe.of.tensors
    order = _order(recipe.of, len(source.shape))
    inner: list[tuple[int, int]] = [(0, 0)] * len(order)
    for here, there in enumerate(order):
        inner[there] = box[here]
    return reader._read(source, tuple(inner)).permute(order)


def _order(call: Call, ndim: int) -> list[int]:
    """Return which dim of its tensor each dim of the result is."""
    order = list(range(ndim))
    if call.function is _aten.permute.default:
        return [dim % ndim for dim in call.args[1]]
    one, other = (0, 1) if call.function is _aten.t.default else (call.args[1] % ndim, call.args[2] % ndim)
    if ndim > 1:
        order[one], order[other] = order[other], order[one]
    return order


def _sliced(reader: Reader, recipe: Result, box: Box) -> Tensor | None:
    (source,), call = recipe.of.tensors, recipe.of
    dim = _argument(call, 1, "dim", 0) % len(source.shape)
    if _argument(call, 4, "step", 1) != 1:
        return None
    start = _argument(call, 2, "start", None) or 0
    start = max(start + source.shape[dim], 0) if start < 0 else min(start, source.shape[dim])
    return reader._read(source, _moved(box, dim, start))


def _selected(reader: Reader, recipe: Result, box: Box) -> Tensor | None:
    (source,), (_, dim, index) = recipe.of.tensors, recipe.of.args
    dim, index = dim % len(source.shape), index % source.shape[dim]
    return reader._read(source, (*box[:dim], (index, index + 1), *box[dim:])).squeeze(dim)


def _unsqueezed(reader: Reader, recipe: Result, box: Box) -> Tensor | None:
    (source,), (_, dim) = recipe.of.tensors, recipe.of.args
    dim %= len(recipe.shape)
    inner = reader._read(source, (*box[:dim], *box[dim + 1 :]))
    return inner.unsqueeze(dim)[(*(slice(None),) * dim, slice(*box[dim]))]


def _split(reader: Reader, recipe: Result, box: Box) -> Tensor | None:
    (source,), call, at = recipe.of.tensors, recipe.of, recipe.at or 0
    dim = _argument(call, 2, "dim", 0) % len(source.shape)
    sizes = call.args[1]
    start = sum(sizes[:at]) if isinstance(sizes, Sequence) else at * sizes
    return reader._read(source, _moved(box, dim, start))


def _moved(box: Box, dim: int, by: int) -> Box:
    start, stop = box[dim]
    return (*box[:dim], (start + by, stop + by), *box[dim + 1 :])


def _joined(reader: Reader, recipe: Result, box: Box) -> Tensor | None:
    """Tensors one after the other; `torch.stack` gives each a dim of its own first."""
    call, sources = recipe.of, recipe.of.tensors
    if [leaf.at for leaf in call.args[0] if isinstance(leaf, Hole)] != list(range(len(sources))):
        return None
    stacks = call.function is _aten.stack.default
    dim = _argument(call, 1, "dim", 0) % len(recipe.shape)
    start, stop = box[dim]
    parts, at = [], 0
    for source in sources:
        if not stacks and len(source.shape) != len(recipe.shape):
            return None  # torch passes over empty tensors of one dim
        size = 1 if stacks else source.shape[dim]
        left, right = max(start, at), min(stop, at + size)
        if left < right and stacks:
            parts.append(reader._read(source, (*box[:dim], *box[dim + 1 :])).unsqueeze(dim))
        elif left < right:
            parts.append(reader._read(source, (*box[:dim], (left - at, right - at), *box[dim + 1 :])))
        at += size
    if len(parts) != 1:
        reader._look()
    if not parts:
        return torch.empty([stop - start for start, stop in box], dtype=recipe.dtype)
    return reader._as(parts[0] if len(parts) == 1 else torch.cat(parts, dim), recipe.dtype)


_FOLLOWED: dict[Any, _Follow] = {
    **dict.fromkeys(
        (
            _aten.alias.default,
            _aten.detach.default,
            _aten.lift_fresh.default,
            _aten.clone.default,
            _aten._to_copy.default,
            _aten.view.default,
            _aten._unsafe_view.default,
        ),
        _same,
    ),
    **dict.fromkeys((_aten.t.default, _aten.transpose.int, _aten.permute.default), _permuted),
    _aten.slice.Tensor: _sliced,
    _aten.select.int: _selected,
    _aten.unsqueeze.default: _unsqueezed,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split,
    **dict.fromkeys((_aten.cat.default, _aten.stack.default), _joined),
}
