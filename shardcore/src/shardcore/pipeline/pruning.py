"""Models that keep the tensors of some parts alone, and calls of parts that a handler answers instead of their code."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardcore.comm.dtensor_params import local_tensor
from shardcore.nn.mixin import once
from shardcore.pipeline.metadata import PROBE
from shardcore.plan.cut import Cut


class CallHandler(Protocol):
    """Is asked for every call of the intercepted parts of a model while a forward runs."""

    def called(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what the part ``name`` is called with; before its hooks, and outside of a recomputation."""

    def forward(self, name: str, native: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the part's forward, which is ``native``, returns."""


class Intercepted:
    """A part that tells a handler of its calls, and lets it answer in the place of the part's forward.

    Hooks run around what is answered as they do around the forward: libraries collect states by them.
    """

    #: The name of the part in the model, and who handles calls now: a list of one, which the whole model shares.
    _pipeline_part: tuple[str, list[CallHandler]]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the part with what the handler says, whatever else a call of it does."""
        name, handlers = self._pipeline_part
        args, kwargs = handlers[0].called(name, args, kwargs)
        return super().__call__(*args, **kwargs)  # type: ignore[misc]  # a module's

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the handler answers."""
        name, handlers = self._pipeline_part
        return handlers[0].forward(name, super().forward, args, kwargs)  # type: ignore[misc]  # a module's


class Typed:
    """Tells the dtype and the device that the parameters had, which models ask their parts for."""

    _pipeline_types: tuple[torch.dtype, torch.device]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model."""
        return self._pipeline_types[0]

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return self._pipeline_types[1]


@once
def _derived(mixin: type, cls: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of the class of modules, under its name: libraries go by names."""
    namespace = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (mixin, cls), namespace)


def intercept(module: nn.Module, name: str, handlers: list[CallHandler]) -> None:
    """Let the first of ``handlers`` answer calls of ``module``, the part ``name`` of its model."""
    if not isinstance(module, Intercepted):
        module.__class__ = _derived(Intercepted, type(module))
    module.__dict__["_pipeline_part"] = (name, handlers)


def parts_of(model: nn.Module, cut: Cut) -> dict[str, tuple[str, nn.Module | None]]:
    """Return for each name of a part the first of all its names, since it may have several, and the module that it is.

    A part that is a parameter or a buffer has no module.
    """
    first: dict[int, str] = {}
    found = {}
    for name in cut.parts():
        owner, _, leaf = name.rpartition(".")
        value = getattr(model.get_submodule(owner), leaf)
        module = value if isinstance(value, nn.Module) else None
        found[name] = (name if module is None else first.setdefault(id(module), name), module)
    return found


def prune(
    model: nn.Module,
    parts: Iterable[str],
    held: Collection[str],
    device: torch.device | str,
    dtype: torch.dtype | None = None,
) -> dict[str, PrunedTensors]:
    """Take the tensors of all ``parts`` but those that are ``held`` out of ``model``; return them by part.

    What a part that is held shares with others stays. The model computes in ``dtype``, or in that of the tensors.
    """
    types = {m: dtype or m.dtype for m in model.modules() if isinstance(getattr(type(m), "dtype", None), property)}
    claimed = {(id(module), leaf) for name in held for module, leaf in tensors_below(model, name)}
    pruned = {}
    for name in dict.fromkeys(parts):
        if name not in held:
            own = [(module, leaf) for module, leaf in tensors_below(model, name) if (id(module), leaf) not in claimed]
            claimed |= {(id(module), leaf) for module, leaf in own}
            pruned[name] = PrunedTensors(own, device, dtype)
    for module, known in types.items():
        if next(module.parameters(), None) is None:
            module.__class__ = _derived(Typed, type(module))
            module.__dict__["_pipeline_types"] = (known, torch.device(device))
    return pruned


class PrunedTensors:
    """The tensors of a part that a model does not hold: no parameters, buffers or states any more, and no memory.

    What reads one, for its shape or dtype, reads a tensor of them in which every number is NaN; so a value that
    depends on what only another stage has cannot be taken for one.
    """

    def __init__(
        self, owners: Sequence[tuple[nn.Module, str]], device: torch.device | str, dtype: torch.dtype | None = None
    ) -> None:
        self._tensors: list[tuple[nn.Module, str, Tensor, Tensor]] = []
        for module, name in owners:
            held = module._parameters if name in module._parameters else module._buffers
            tensor = held.pop(name)
            if tensor is None:
                held[name] = None
                continue
            meta = tensor.detach().to("meta")
            if isinstance(tensor, nn.Parameter):
                meta = nn.Parameter(meta, requires_grad=tensor.requires_grad)
            self._tensors.append((module, name, meta, _alike(tensor, device, dtype)))
        self.fill(PROBE)

    def fill(self, number: float, whole: int = 0) -> None:
        """Let every number that is read be ``number``, or ``whole`` where it cannot be NaN."""
        for module, name, _, shown in self._tensors:
            shown.as_strided((), ()).fill_(number if shown.is_floating_point() else whole)
            module.__dict__[name] = shown

    @contextmanager
    def on_meta(self) -> Iterator[None]:
        """Let the modules have their tensors on meta, so that they can be called there."""
        for module, name, meta, _ in self._tensors:
            del module.__dict__[name]
            _held(module, meta)[name] = meta
        try:
            yield
        finally:
            for module, name, meta, shown in self._tensors:
                del _held(module, meta)[name]
                module.__dict__[name] = shown


def _held(module: nn.Module, tensor: Tensor) -> Any:
    return module._parameters if isinstance(tensor, nn.Parameter) else module._buffers


def _alike(tensor: Tensor, device: torch.device | str, computed: torch.dtype | None) -> Tensor:
    """Return a tensor of one number that has the shape and the dtype of another one; of a DTensor, of its part."""
    casts = computed is not None and isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
    dtype = computed if casts else tensor.dtype
    return torch.zeros((), dtype=dtype, device=device).expand(local_tensor(tensor).shape)


def tensors_below(model: nn.Module, name: str) -> Iterator[tuple[nn.Module, str]]:
    """Yield the modules below ``name``, which may be a parameter or buffer itself, with the names of their tensors."""
    owner, _, leaf = name.rpartition(".")
    holder = model.get_submodule(owner)
    if leaf in holder._parameters or leaf in holder._buffers:
        yield holder, leaf
        return
    for module in model.get_submodule(name).modules():
        yield from ((module, own) for own in (*module._parameters, *module._buffers))
