"""Float64 all the way: what a model computes in float32 whatever its dtype is computed in float64.

Many models compute norms, softmaxes and losses in float32 even when they are float64. What a rank adds up is then
rounded before it is summed, to some 1e-8, and differently by each kernel: a bound that holds on one processor fails on
another, and one that holds on all of them hides mistakes.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: Functions of a tensor that convert it first, by ``dtype=`` or by position.
_CONVERTING = ("softmax", "log_softmax", "sum", "mean", "cumsum")


class _State:
    """How many contexts are open, and in how many conversions of whole modules the process is inside of them."""

    depth = 0
    suspended = 0


def without_islands() -> torch.dtype | None:
    """Return the default dtype of a process that is inside `no_float32_islands`, None outside."""
    return torch.get_default_dtype() if _State.depth else None


@contextmanager
def no_float32_islands() -> Iterator[None]:
    """Leave float64 tensors in float64 where a model asks for float32, in the whole process.

    Inside, ``x.float()``, ``x.to(torch.float32)``, ``x.type(torch.float32)`` and ``softmax(x, dtype=torch.float32)``
    (and ``log_softmax``, ``sum``, ``mean``, ``cumsum``, ``zeros_like``) of a float64 ``x`` stay in float64; a product
    of a float64 and a float32 matrix is computed in float64. Where float64 is the default dtype, what is made of
    integers and by ``torch.zeros`` is in float64 too, and modules stay in it. All else is converted as ever; so is a
    module as a whole (``model.float()``). A backward and what it recomputes belong inside too. Contexts may be nested,
    and also decorate functions; `WorkerPool.run` called inside one runs its function inside one on every rank. What
    TorchScript compiles is compiled with torch's own functions: an island in it stays one.

    A comparison of a float64 model with its sharded copy then agrees to some 1e-14 on every processor.
    """
    if _State.depth == 0:
        undo = _replace()
    else:
        undo = []
    _State.depth += 1
    try:
        yield
    finally:
        _State.depth -= 1
        _restore(undo)
        if undo and "torch._dynamo" in sys.modules:
            # What it took for the methods of a tensor inside is remembered for good, and those outside break graphs.
            torch._dynamo.trace_rules.clear_lru_cache()  # as torch.distributed does when it replaces functions


@contextmanager
def in_float64() -> Iterator[None]:
    """Make float64 the default dtype, and leave it nowhere: a model may make masks and zeros of the default."""
    with default_dtype(torch.float64), no_float32_islands():
        yield


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make ``dtype`` the default, and go back to the one before."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


#: Most methods of a tensor are its base's, in C; torch.compile knows them while `Tensor` has none of its own.
_INHERITED = object()


def _replace() -> list[tuple[Any, str, Any]]:
    """Put the functions of torch that make islands out of the way, and return what each owner had of its own."""
    with torch.device("cpu"):  # which remembers, from its first call on, what makes tensors: torch's own functions
        torch.zeros(0)
    made: list[tuple[Any, str, Callable[..., Any]]] = [
        (Tensor, "float", _float(Tensor.float)),
        (Tensor, "to", _converting(Tensor.to)),
        (Tensor, "type", _converting(Tensor.type)),
        (Tensor, "__matmul__", _promoting(Tensor.__matmul__)),
        (nn.Module, "_apply", _suspending(nn.Module._apply)),
        *((F, name, _converting(getattr(F, name))) for name in ("softmax", "log_softmax")),
        *((torch, name, _converting(getattr(torch, name))) for name in ("zeros", "zeros_like", "as_tensor")),
    ]
    for name in _CONVERTING:
        # Over the method: torch.compile traces one that it does not find in the place of a function of torch.
        method = _converting(getattr(Tensor, name))
        made += [(Tensor, name, method), (torch, name, _of_tensors(method, getattr(torch, name)))]
    undo = [(owner, name, vars(owner).get(name, _INHERITED)) for owner, name, _ in made]
    undo.append((torch.jit, "script", torch.jit.script))
    made.append((torch.jit, "script", _natively(torch.jit.script, undo)))
    for owner, name, replaced in made:
        setattr(owner, name, replaced)
    return undo


def _restore(undo: list[tuple[Any, str, Any]]) -> None:
    for owner, name, native in undo:
        if native is _INHERITED:
            delattr(owner, name)
        else:
            setattr(owner, name, native)


def _natively(native: Callable[..., Any], undo: list[tuple[Any, str, Any]]) -> Callable[..., Any]:
    """Let ``native``, which compiles, find torch's own functions: it would compile those in their place."""

    @functools.wraps(native)
    def call(*args: Any, _frames_up: int = 0, **kwargs: Any) -> Any:
        inside = [(owner, name, vars(owner)[name]) for owner, name, _ in undo]
        _restore(undo)
        try:
            return native(*args, _frames_up=_frames_up + 1, **kwargs)
        finally:
            _restore(inside)

    return call


def _stays(x: Any) -> bool:
    if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()):
        return x.dtype is torch.float64 and not _State.suspended
    return torch.get_default_dtype() is torch.float64 and not _State.suspended


def _float(native: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(native)
    def call(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return x.double() if _stays(x) else native(x, *args, **kwargs)

    return call


def _converting(native: Callable[..., Any]) -> Callable[..., Any]:
    """Give ``native`` float64 for float32 in its arguments, where its first stays in it."""

    @functools.wraps(native)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _stays(args[0] if args else None):
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            kwargs = {name: torch.float64 if a is torch.float32 else a for name, a in kwargs.items()}
        return native(*args, **kwargs)

    return call


def _of_tensors(method: Callable[..., Any], native: Callable[..., Any]) -> Callable[..., Any]:
    """Call ``method`` for tensors, and ``native`` for what only says how it answers functions of torch."""

    @functools.wraps(native)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (method if args and isinstance(args[0], Tensor) else native)(*args, **kwargs)

    return call


def _promoting(native: Callable[..., Any]) -> Callable[..., Any]:
    """Let ``native`` compute in float64 where one of two factors is: the other came from integers (positions)."""

    @functools.wraps(native)
    def call(x: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(x, Tensor) and isinstance(other, Tensor) and {x.dtype, other.dtype} == _MIXED:
            x, other = x.double(), other.double()
        return native(x, other, *args, **kwargs)

    return call


_MIXED = {torch.float64, torch.float32}


def _suspending(native: Callable[..., Any]) -> Callable[..., Any]:
    """Let ``native``, which converts whole modules, convert as it was asked to, but where float64 is the default."""

    @functools.wraps(native)
    def call(*args: Any, **kwargs: Any) -> Any:
        converts = torch.get_default_dtype() is not torch.float64
        _State.suspended += converts
        try:
            return native(*args, **kwargs)
        finally:
            _State.suspended -= converts

    return call
