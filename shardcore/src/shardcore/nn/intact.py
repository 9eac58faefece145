"""Noticing modules that somebody put among the parallel ones after the model was sharded.

An adapter around a split linear, or any module between those of a region, works on this rank's part of the features:
its output, and the gradients of its parameters, are partial, and nobody sums them. So the modules that must stay are
recorded when the model is sharded, and compared in its outermost call.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from torch import nn
from torch.distributed.tensor import DTensor

from shardcore.errors import WrapError
from shardcore.nn.base import ReplacedMethods
from shardcore.nn.libraries import ask, library_of
from shardcore.nn.linear.embedding import VocabEmbedding
from shardcore.nn.linear.parallel import ColumnLinear, RowLinear
from shardcore.nn.mixin import mixins
from shardcore.nn.randomness import is_dropout

#: On a module that was put around a parallel one by code that knows it: that one.
AROUND = "_shard_around"

#: Where functions of single elements are, by which others may be replaced, and what is there too.
_ACTIVATIONS = ("activation", "activations")
_OF_SEVERAL = frozenset({"GLU", "LogSoftmax", "MultiheadAttention", "RReLU", "Softmax", "Softmax2d", "Softmin"})

_WAY_OUT = "To go on with this model, put back what was there."


class _Place(NamedTuple):
    """A module that has to stay, and where."""

    path: str
    siblings: dict[str, nn.Module | None]  # the ``_modules`` of its parent
    name: str
    module: nn.Module


class Intact:
    """The modules and parameters of a sharded model that must not be changed.

    Layers may be replaced, wrapped, or removed as a whole, and so may anything outside of regions. The model is not
    kept here, so that it is freed as soon as nobody uses it.

    Args:
        model: the sharded model.
        regions: names of the modules below which activations are split over the ranks, and of the column linears that
            enter a region of their own.
        tokens: names of the modules in which activations are split along the sequence.
        replicas: the number of data-parallel replicas.
    """

    def __init__(self, model: nn.Module, regions: Collection[str], tokens: Collection[str], replicas: int) -> None:
        self._inside = [model.get_submodule(path) for path in regions]
        self._tokens = tuple(tokens)
        self._replicas = replicas
        self._places = list(_places(model, regions))
        self._first = {owner: frozenset(owner._parameters) for owner in model.modules()}
        self._remember(model)

    def _remember(self, model: nn.Module) -> None:
        """Record the model as it is now, and forget modules that were removed."""
        modules = list(model.modules())
        self._children_of = [module._modules for module in modules]
        self._parameters_of = [module._parameters for module in modules]
        self._known = self._now()
        there = set(map(id, self._children_of))
        self._places = [place for place in self._places if id(place.siblings) in there]
        self._first = {owner: self._first[owner] for owner in modules if owner in self._first}
        self._inside = [module for module in self._inside if module in self._first]

    def accept(self, model: nn.Module) -> None:
        """Take what the model has now for what it had when it was sharded: whoever has added it looks after it."""
        self._first |= {owner: frozenset(owner._parameters) for owner in model.modules()}
        self._remember(model)

    def _now(self) -> tuple[list[nn.Module | None], int]:
        children = itertools.chain.from_iterable(map(dict.values, self._children_of))
        return list(children), sum(map(len, self._parameters_of))

    def check(self, model: nn.Module) -> None:
        """Raise a `WrapError` for a module or parameter that somebody has put since where it cannot work."""
        if self._now() == self._known:  # modules are compared by identity
            return
        for path, siblings, name, module in self._places:
            found = siblings.get(name)
            if found is not None and found is not module and not _may_replace(found, module):
                raise WrapError(
                    f"{path} of this sharded {type(model).__name__} is {_kind(found)} now, where shard() had made "
                    f"{_kind(module)}: it would compute with what one rank has, and gradients would be wrong. "
                    f"{_instead_of(found)}{_WAY_OUT}"
                )
            if found is module and (name_of := _normed(module)):
                raise WrapError(
                    f"{path}.{name_of} of this sharded {type(model).__name__} has a weight_norm now, which would "
                    "divide by norms of what one rank has. A sharded linear has none, whether it comes before shard() "
                    "or after it: build the model anew, and leave it out there (other parametrizations, of single "
                    "values, work)"
                )
        new = list(self._new_parameters(model))
        for path, why, trainable in new:
            if trainable:
                raise WrapError(
                    f"{path} is a parameter that this {type(model).__name__} did not have when it was sharded: {why}. "
                    f"{_instead_of(None)}{_WAY_OUT}"
                )
        if not new:  # those that are frozen may be trained later
            self._remember(model)

    def _new_parameters(self, model: nn.Module) -> Iterator[tuple[str, str, bool]]:
        """Yield new plain parameters whose gradients nobody would sum, why, and whether they need one."""
        inside = {below for module in self._inside for below in module.modules()}
        for path, owner in model.named_modules():
            for name, parameter in owner._parameters.items():
                old = owner in self._first and name in self._first[owner]
                if parameter is None or old or isinstance(parameter, DTensor):
                    continue
                if why := self._why_not(path, owner in inside):
                    yield f"{path}.{name}" if path else name, why, parameter.requires_grad

    def _why_not(self, path: str, inside: bool) -> str | None:
        if inside:
            return "it is used with one rank's part of the features, and its gradient is that rank's summand"
        if any(path == place or path.startswith(f"{place}.") for place in self._tokens):
            return "it is used with one rank's tokens, and its gradient is that rank's summand"
        if self._replicas > 1:
            return f"nobody averages its gradient over the {self._replicas} data-parallel replicas"
        return None


def _instead_of(found: nn.Module | None) -> str:
    """Return what clients say is to be done instead of putting ``found``, or any module of theirs, into a model."""
    said = ask("", "INSTEAD_OF_CHANGING") if found is None else [ask(library_of(found), "INSTEAD_OF_CHANGING")]
    return "".join(f"{words} " for words in said or () if words)


def _may_replace(found: nn.Module, module: nn.Module) -> bool:
    """Tell whether ``found`` computes with one rank's part what it would with the whole, in the place of ``module``."""
    if found.__dict__.get(AROUND) is module:
        return True
    kind = type(found)
    activation = kind is nn.Identity or (
        kind.__module__.rpartition(".")[2] in _ACTIVATIONS and kind.__name__ not in _OF_SEVERAL
    )
    own = is_dropout(module) or not (_is_parallel(module) or _has_state(module))
    return activation and own and not _has_state(found)


def _normed(module: nn.Module) -> str | None:
    """Return the parameter of ``module`` that torch's ``weight_norm`` computes, or None."""
    lists = module._modules.get("parametrizations")
    for name, each in lists.named_children() if isinstance(lists, nn.ModuleDict) else ():
        if any(type(one).__name__ == "_WeightNorm" for one in each.children()):
            return name
    return None


def _kind(module: nn.Module) -> str:
    return f"a {type(module).__module__}.{type(module).__qualname__}"


def _places(model: nn.Module, regions: Collection[str]) -> Iterator[_Place]:
    """Yield the places of all parallel modules, and of what lies between them."""
    between = set(_between(model, regions))
    for path, parent in model.named_modules():
        for name, module in parent._modules.items():
            own = f"{path}.{name}" if path else name
            if module is None:
                continue
            if isinstance(module, ColumnLinear | RowLinear | VocabEmbedding) or own in between:
                yield _Place(own, parent._modules, name, module)


def _between(model: nn.Module, regions: Iterable[str]) -> Iterator[str]:
    for region in regions:
        entry = model.get_submodule(region)
        if not isinstance(entry, ColumnLinear):
            yield from (f"{region}.{path}" for path, _ in entry.named_modules() if path)
            continue
        owner = region.rpartition(".")[0]
        for name, sibling in model.get_submodule(owner).named_children():  # activation functions
            if not _is_parallel(sibling) and not is_dropout(sibling) and not _has_state(sibling):
                yield f"{owner}.{name}" if owner else name


def _is_parallel(module: nn.Module) -> bool:
    # Methods of a user in place of the native ones leave the module what it was.
    return any(not issubclass(mixin, ReplacedMethods) for mixin in mixins(module))


def _has_state(module: nn.Module) -> bool:
    return any(True for _ in itertools.chain(module.parameters(), module.buffers()))
