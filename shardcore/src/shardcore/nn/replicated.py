"""Modules that keep their own forward on replicated DTensor parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from shardcore.comm.dtensor_params import read_local, read_partial
from shardcore.mesh import ShardContext
from shardcore.nn.base import SwappedModule
from shardcore.nn.costs import Collective, Site, backward
from shardcore.nn.layout import Layout, ReplicatedLayout
from shardcore.nn.linear.together import Reading
from shardcore.nn.sequence.tokens import SequenceShard

__all__ = ["Replicated"]


class Replicated(SwappedModule):
    """A native module that runs its own forward while its parameters are DTensors.

    While its forward runs, the module's own parameters are replaced by local tensors; at all other times they are the
    DTensors. That is enough for norms, classification heads and position tables.

    Options:
        partial: each rank applies the module to its part of the activations (norms on queries and keys), so gradients
            are partial, and are summed over the ranks.
        with_region: the entry of the region around it reads the parameters, so that their gradients are summed with
            others; the module reads them itself where it is called outside of the region.
    """

    keeps_name: ClassVar[bool] = True
    option_names: ClassVar[frozenset[str]] = frozenset({"partial", "with_region"})
    #: Whether a subclass gives each rank a part of the parameters, not all of them.
    holds_parts: ClassVar[bool] = False

    #: Set where the activations that it sees are split along the sequence.
    _shard_sequence: SequenceShard | None
    _partial: bool
    #: While its region is open: what the region's entry has read for it.
    _shard_reading: Reading | None
    #: Whether each gradient is a tensor that nobody else holds.
    _fresh: bool
    _native_class: type[nn.Module]
    _shard_context: ShardContext

    @classmethod
    @override
    def layouts(cls, module: nn.Module, ranks: int, *, partial: bool = False, **options: Any) -> Mapping[str, Layout]:
        return {
            name: ReplicatedLayout(partial_gradient=partial) for name, p in module._parameters.items() if p is not None
        }

    @classmethod
    @override
    def plan_sums_gradients(cls, *, partial: bool = False, **options: Any) -> bool:
        return partial

    @classmethod
    @override
    def plan_collectives(
        cls, site: Site, *, partial: bool = False, with_region: bool = False, **options: Any
    ) -> Iterator[Collective]:
        if (partial or site.split) and site.sums_at_once and not with_region:
            yield backward(site.path, "all_reduce", "its parameters' gradients")

    @override
    def _take_sequence(self, tokens: SequenceShard | None) -> None:
        self.__dict__["_shard_sequence"] = tokens

    @classmethod
    @override
    def swap_class(cls, module: nn.Module, context: ShardContext, *, partial: bool = False, **options: Any) -> Self:
        native = type(module)
        new = super().swap_class(module, context)
        new.__dict__["_shard_sequence"] = new.__dict__["_shard_reading"] = None
        new._partial = partial
        # A lookup makes the gradient of its table, which may be large; so it is not copied.
        new._fresh = native.forward is nn.Embedding.forward
        new._native_class = native
        return new

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the native forward on the local tensors of the parameters."""
        if torch.compiler.is_compiling():
            return self._stand_in().forward(*args, **kwargs)
        own = self._exchange()
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.__dict__["_parameters"] = own

    def run_method(self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``method``, one of the native class, on the local tensors of the parameters."""
        if torch.compiler.is_compiling():
            return method(self._stand_in(), *args, **kwargs)
        own = self._exchange()
        try:
            return method(self, *args, **kwargs)
        finally:
            self.__dict__["_parameters"] = own

    @property
    def _shard_parameters(self) -> tuple[Tensor, ...]:
        """The parameters that the module holds itself, in their order."""
        return tuple(p for p in self._parameters.values() if p is not None)

    def _read(self) -> dict[str, Any]:
        own = self._parameters
        shared = {name: p for name, p in own.items() if p is not None}
        reading = None if torch.compiler.is_compiling() else self._shard_reading
        if reading is not None and reading.is_of(list(shared.values())):
            return {**own, **dict(zip(shared, reading.parameters, strict=True))}
        partial = self._partial or (self._shard_sequence is not None and self._shard_sequence.length is not None)
        if partial:
            local = read_partial(self._shard_context.channel, *shared.values(), deferred=self._shard_context.defers)
        else:
            local = read_local(*shared.values(), fresh=self._fresh)
        return {**own, **dict(zip(shared, local, strict=True))}

    def _exchange(self) -> dict[str, Any]:
        """Replace the parameters by local tensors, unless they are, and return what was there before."""
        own: dict[str, Any] = self._parameters
        if not isinstance(own, _Local):
            # An entry of the instance's dict, not an assignment: nn.Module.__setattr__ would look at every registry.
            self.__dict__["_parameters"] = _Local(self._read())
        return own

    def _stand_in(self) -> Any:
        # A checkpoint in a compiled graph may not change what was there before it, so a stand-in holds the parameters.
        stand_in = object.__new__(self._native_class)
        stand_in.__dict__.update(self.__dict__)
        stand_in.__dict__["_parameters"] = self._read()
        return stand_in


class _Local(dict[str, Any]):
    """Local tensors in the place of a module's parameters, while it runs."""
