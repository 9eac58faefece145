"""Modules that keep their own forward on DTensor parameters: whole ones, or those of this rank's heads or channels."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from shardcore._torch import backward_task
from shardcore.comm.dtensor_params import expect_dtensor, read_local, read_partial, splits_on_tp
from shardcore.comm.strided import Runs
from shardcore.mesh.context import ShardContext
from shardcore.nn.base import ParallelMixin
from shardcore.nn.costs import Collective, Site, backward
from shardcore.nn.layout import Layout, ReplicatedLayout, ShardedLayout
from shardcore.nn.linear.members import Reading, take_rows


class Replicated(ParallelMixin):
    """A native module that runs its own forward while its parameters are DTensors.

    While its forward runs, the module's own parameters are replaced by local tensors; at all other times they are the
    DTensors. A module above it that reads one of them in its own forward (``self.embed.weight``) is given the local
    tensor too. That is enough for norms, classification heads and position tables.

    Options:
        partial: each rank applies the module to its part of the activations (norms on queries and keys), so gradients
            are partial, and are summed over the ranks.
        with_region: the entry of the region around it reads the parameters, so that their gradients are summed with
            others; the module reads them itself where it is called outside of the region.
        names: the parameters that are meant; by default all of the module's own. Several rules may each name some.
        used: the rows of partial ones that each rank uses, by rank, such as the channels of its heads; None for all.
    """

    keeps_name: ClassVar[bool] = True
    option_names: ClassVar[frozenset[str]] = frozenset({"names", "partial", "used", "with_region"})
    #: Whether a subclass gives each rank a part of the parameters, not all of them.
    holds_parts: ClassVar[bool] = False

    #: The parameters whose gradients are summed, wherever the module is called.
    _summed: frozenset[str]
    #: Those of which this rank has a part: their gradients are its own.
    _split: frozenset[str]
    #: While its region is open: what the region's entry has read for it.
    _shard_reading: Reading | None
    #: The rows that it uses of what is summed; None for all.
    _used: Runs | None
    #: Whether each gradient is a tensor that nobody else holds.
    _fresh: bool
    _native_class: type[nn.Module]
    _shard_context: ShardContext

    @classmethod
    @override
    def problem(cls, module: nn.Module, ranks: int, *, names: tuple[str, ...] = (), **options: Any) -> str | None:
        if problem := super().problem(module, ranks):
            return problem
        missing = [name for name in names if module._parameters.get(name) is None]
        return f"{type(module).__name__} has no parameter {', '.join(missing)}" if missing else None

    @classmethod
    @override
    def layouts(
        cls, module: nn.Module, ranks: int, *, partial: bool = False, names: tuple[str, ...] = (), **options: Any
    ) -> Mapping[str, Layout]:
        return dict.fromkeys(names or _own(module._parameters), ReplicatedLayout(partial_gradient=partial))

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

    @classmethod
    @override
    def swap_class(
        cls,
        module: nn.Module,
        context: ShardContext,
        *,
        partial: bool = False,
        names: tuple[str, ...] = (),
        **options: Any,
    ) -> Self:
        native = type(module)
        new = super().swap_class(module, context)
        state = new.__dict__
        if "_summed" not in state:  # else another rule has named other parameters
            # A lookup makes the gradient of its table, which may be large; so it is not copied.
            state |= {"_summed": frozenset(), "_native_class": native}
            state |= {"_shard_reading": None, "_used": options["used"][context.rank] if "used" in options else None}
            state["_fresh"] = native.forward is nn.Embedding.forward
            held = _own(new._parameters).items()
            state["_split"] = frozenset(name for name, p in held if isinstance(p, DTensor) and splits_on_tp(p))
        state["_summed"] |= frozenset(names or _own(new._parameters) if partial else ())
        return new

    def __getattr__(self, name: str) -> Any:
        """Return a parameter, a buffer or a child; a parameter as its local tensor while the model runs.

        So a module above this one reads what this one would.
        """
        found = super().__getattr__(name)
        if not isinstance(found, DTensor) or not self._model_runs() or _asked_by_torch():
            return found
        # What others do with a table is no lookup.
        return self._read({name: found}, fresh=False)[name]

    def _model_runs(self) -> bool:
        if torch.compiler.is_compiling() or self._shard_context.random.in_use:
            return True
        # In a backward a checkpoint recomputes a part of the forward, after the model's call has ended; hooks of the
        # backward run without gradients.
        return torch.is_grad_enabled() and backward_task() != -1

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the native forward on the local tensors of the parameters."""
        if torch.compiler.is_compiling():
            return self._native_class.forward(self._stand_in(), *args, **kwargs)
        state, own = self.__dict__, self._parameters
        if not isinstance(own, _Local):  # else a method that `run_method` runs calls it
            # An entry of the instance's dict, not an assignment: nn.Module.__setattr__ would look at every registry.
            state["_parameters"] = _Local(self._read(own, fresh=self._fresh))
        try:
            return super().forward(*args, **kwargs)
        finally:
            state["_parameters"] = own

    def run_method(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call ``method``, one of the native class, on the local tensors of the parameters."""
        if torch.compiler.is_compiling():
            return method(self._stand_in(), *args, **kwargs)
        own = self._parameters
        self.__dict__["_parameters"] = own if isinstance(own, _Local) else _Local(self._read(own, fresh=self._fresh))
        try:
            return method(self, *args, **kwargs)
        finally:
            self.__dict__["_parameters"] = own

    @property
    def _shard_parameters(self) -> tuple[Tensor, ...]:
        """The parameters that the module holds itself, in their order."""
        return tuple(p for p in self._parameters.values() if p is not None)

    def _read(self, own: Mapping[str, Any], *, fresh: bool) -> dict[str, Any]:
        """Return ``own``, parameters by name, with local tensors in place of DTensors; ``fresh`` as `read_local`."""
        context, tokens = self._shard_context, self._shard_sequence
        alike = tokens is None or tokens.length is None  # every rank sees the same tokens
        if alike and not self._summed and self._shard_reading is None:
            local, names, tensors = dict(own), [], []
            for name, parameter in own.items():  # on the way of every norm: a comprehension would be a call more
                if parameter is not None:
                    names.append(name)
                    tensors.append(parameter)
            local.update(zip(names, read_local(*tensors, fresh=fresh), strict=True))
            return local
        shared = _own(own)
        reading = None if torch.compiler.is_compiling() else self._shard_reading
        if reading is not None and reading.is_of(self._shard_parameters):
            found = dict(zip(_own(self._parameters), reading.parameters, strict=True))
            local = {**own, **{name: found[name] for name in shared}}
        else:
            summed = [name for name in shared if name in self._summed or not (alike or name in self._split)]
            local = dict(own)
            if summed:
                read = read_partial(context.channel, *(own[name] for name in summed), deferred=context.defers)
                local.update(zip(summed, read, strict=True))
            if rest := [name for name in shared if name not in summed]:
                local.update(zip(rest, read_local(*(own[name] for name in rest), fresh=fresh), strict=True))
        rows = self._used
        return {**local, **{name: take_rows(local[name], rows) for name in shared}} if rows is not None else local

    def _stand_in(self) -> Any:
        # A checkpoint in a compiled graph may not change what was there before it, so a stand-in holds the parameters.
        stand_in = object.__new__(self._native_class)
        stand_in.__dict__.update(self.__dict__)
        stand_in.__dict__["_parameters"] = self._read(self._parameters, fresh=self._fresh)
        return stand_in


class HeadParameters(Replicated):
    """A native module with parameters that belong to heads or channels: each rank has those of its own.

    Tables of biases (..., heads), scales (heads, 1, 1), state matrices (channels, N). Their gradients are this rank's
    own and never summed. Whatever else the module holds is read as a `Replicated` reads it.

    Options:
        dim: the dim along which heads or channels lie; it may count from the end.
        names: the parameters that are meant; by default all of the module's own.
    """

    option_names: ClassVar[frozenset[str]] = frozenset({"dim", "names"})

    @classmethod
    @override
    def layouts(
        cls, module: nn.Module, ranks: int, *, dim: int = 0, names: tuple[str, ...] = (), **options: Any
    ) -> Mapping[str, Layout]:
        ndims = {name: parameter.ndim for name, parameter in _own(module._parameters).items()}
        return {name: ShardedLayout(dim % ndims[name]) for name in names or ndims}

    @override
    def _read(self, own: Mapping[str, Any], *, fresh: bool) -> dict[str, Any]:
        for name, parameter in own.items():
            if name in self._split and parameter is not None:
                expect_dtensor(parameter)
        return super()._read(own, fresh=fresh)

    @classmethod
    @override
    def plan_sums_gradients(cls, **options: Any) -> bool:
        return True

    @classmethod
    @override
    def plan_collectives(cls, site: Site, **options: Any) -> Iterator[Collective]:
        return iter(())


def _asked_by_torch() -> bool:
    """Tell whether what manages parameters asks, as FSDP2 does in a first forward: it wants them as they are."""
    if torch.compiler.is_compiling():
        return False
    frame = inspect.currentframe()
    caller = frame and frame.f_back and frame.f_back.f_back  # of `__getattr__`
    del frame  # which holds itself, and with it the tensors of all its callers, until the collector comes
    return caller is not None and str(caller.f_globals.get("__name__", "")).startswith("torch.distributed.")


def _own(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that a module really has: it may register None under a name."""
    return {name: parameter for name, parameter in parameters.items() if parameter is not None}


class _Local(dict[str, Any]):
    """Local tensors in the place of a module's parameters, while it runs."""
