"""Parts of a model whose calls are watched, and parts without their tensors, which other stages hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardcore.comm.dtensor_params import local_tensor
from shardcore.nn.behaviour import once
from shardcore.pipeline.script import NOWHERE

__all__ = ["Absent", "Call", "Part", "Watch", "tensors_below", "types_kept", "watched"]

Call = Callable[..., Any]
_MARK = "_pipeline_watched"


class Watch(Protocol):
    """Is asked for every call of the parts of a model while a forward runs."""

    def entered(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what the part ``name`` is called with; before its hooks, and outside of a recomputation."""

    def answered(self, name: str, forward: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the part's forward, which is ``forward``, returns."""


class Part:
    """Says to a watch that a part is called, and lets it answer in the place of the part's forward.

    Hooks run around what is answered as they do around the forward: libraries collect states by them.
    """

    #: The name of the part in the model, and who watches now: a list of one, which the whole model shares.
    _pipeline_part: tuple[str, list[Watch]]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the part with what the watch says, whatever else a call of it does."""
        name, watch = self._pipeline_part
        args, kwargs = watch[0].entered(name, args, kwargs)
        return super().__call__(*args, **kwargs)  # type: ignore[misc]  # a module's

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the watch answers."""
        name, watch = self._pipeline_part
        return watch[0].answered(name, super().forward, args, kwargs)  # type: ignore[misc]  # a module's


@once
def _watched_class(cls: type[nn.Module]) -> type[nn.Module]:
    namespace = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, _MARK: True}
    return type(cls.__name__, (Part, cls), namespace)


def watched(module: nn.Module, name: str, watch: list[Watch]) -> None:
    """Make every call of ``module``, the part ``name`` of its model, one that is watched."""
    if _MARK not in vars(type(module)):
        module.__class__ = _watched_class(type(module))
    module.__dict__["_pipeline_part"] = (name, watch)


@contextmanager
def types_kept(model: nn.Module, device: torch.device | str, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Let modules that lose all their parameters inside still tell the dtype and the device that these had.

    Models may ask their parts for both, which look for a parameter.

    Args:
        model: what loses parameters inside.
        device: what is told.
        dtype: what is told; what the parameters had if not given.
    """
    told: dict[Any, Any] = {m: dtype or m.dtype for m in model.modules() if _tells_dtype(m)}
    yield
    for module, known in told.items():
        if next(module.parameters(), None) is None:
            module.__class__ = _typed_class(type(module))
            module.__dict__["_pipeline_types"] = (known, torch.device(device))


def _tells_dtype(module: nn.Module) -> bool:
    return isinstance(getattr(type(module), "dtype", None), property)


class Typed:
    """Tells the dtype and the device that the parameters had."""

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
def _typed_class(cls: type[nn.Module]) -> type[nn.Module]:
    namespace = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (Typed, cls), namespace)


class Absent:
    """The tensors of a part that a model does not hold: no parameters, buffers or states any more, and no memory.

    What reads one, for its shape or dtype, reads a tensor of them in which every number is NaN; so a value that
    depends on what only another stage has cannot be taken for one.

    Args:
        owners: the modules whose own tensors they are, and the names of these.
        device: where the model runs.
        dtype: in which it computes; that of the tensors if not given.
    """

    def __init__(
        self,
        owners: Iterator[tuple[nn.Module, str]],
        device: torch.device | str,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._tensors: list[tuple[nn.Module, str, Tensor, Tensor]] = []
        for module, name in list(owners):
            held = module._parameters if name in module._parameters else module._buffers
            tensor = held.pop(name)
            if tensor is None:
                held[name] = None
                continue
            meta = tensor.detach().to("meta")
            if isinstance(tensor, nn.Parameter):
                meta = nn.Parameter(meta, requires_grad=tensor.requires_grad)
            self._tensors.append((module, name, meta, _alike(tensor, device, dtype)))
        self.fill(NOWHERE)

    def fill(self, number: float) -> None:
        """Let every number that is read be ``number``."""
        for module, name, _, shown in self._tensors:
            if shown.is_floating_point():
                shown.as_strided((), ()).fill_(number)
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
