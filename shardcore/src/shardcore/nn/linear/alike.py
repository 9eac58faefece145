"""What modules with a forward of their own compute, found out by trying it on a small copy.

A parallel linear or embedding replaces the native forward, so it may replace nothing but what it computes itself. A
subclass, or a class of another library, may have written that anew: ``input @ self.weight.T + self.bias``, a weight of
(in, out), a lookup that is scaled. Names tell nothing of that; a trial on the CPU, without any weights, does.
"""

from __future__ import annotations

import contextlib
import itertools
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_LEADING = ((2,), (2, 3), (1, 2, 2))  # the dims of an input before its features


@dataclass(frozen=True, slots=True)
class Product:
    """A module computes ``input @ weight.T + bias``, or, its weight ``transposed``, ``input @ weight + bias``.

    It computes nothing else. A transposed weight is (in, out), as that of a ``Conv1D``; others are (out, in).
    """

    in_features: int
    out_features: int
    transposed: bool = False


def product_of(module: nn.Module, cls: type[nn.Module] | None = None) -> Product | str:
    """Return what a module multiplies, or say why it is no linear.

    A forward other than `torch.nn.Linear`'s is tried on small weights, forward and backward: it has to return what the
    product is, and may read nothing of its module but ``weight``, ``bias`` and sizes. ``cls`` is the class whose
    forward is meant, by default that of the module.
    """
    cls = cls or type(module)
    kind = cls.__qualname__
    own = {name: p for name, p in module._parameters.items() if p is not None}
    weight, bias = own.get("weight"), own.get("bias")
    if weight is None or (not isinstance(module, nn.Linear) and (weight.ndim != 2 or own.keys() - {"weight", "bias"})):
        return f"{kind} has the parameters {', '.join(sorted(own)) or 'none'}, wanted a weight of two dims and a bias"
    if more := sorted(own.keys() - {"weight", "bias"}):
        return f"{kind} has further parameters ({', '.join(more)}) that would not be used"
    if isinstance(module, nn.Linear) and cls.forward is nn.Linear.forward:
        return Product(module.in_features, module.out_features)
    if module._modules or weight.ndim != 2 or (bias is not None and bias.ndim != 1):
        return f"{kind} has a forward of its own, on more than a weight of two dims and a bias"
    rows, columns = weight.shape
    sizes = _Sizes(rows, columns)
    found = _form(cls, _numbers(module, sizes), sizes, with_bias=bias is not None)
    if isinstance(found, str):
        return f"{kind} has a forward of its own, which is no product of its input with the weight: {found}"
    return Product(rows, columns, found) if found else Product(columns, rows, found)


class _Sizes(NamedTuple):
    rows: int
    columns: int

    @property
    def small(self) -> _Sizes:
        """The sizes of the trial, which are equal where these are."""
        return _Sizes(4, 4) if self.rows == self.columns else _Sizes(5, 3)


def _numbers(module: nn.Module, sizes: _Sizes) -> tuple[tuple[str, int], ...]:
    """Return the attributes that are sizes of the weight, with what they are in the trial."""
    small = dict(zip(sizes, sizes.small, strict=True))
    return tuple((name, small[value]) for name, value in vars(module).items() if type(value) is int and value in small)


_FORMS: WeakKeyDictionary[type[nn.Module], dict[Any, bool | str]] = WeakKeyDictionary()


def _form(cls: type[nn.Module], numbers: tuple[tuple[str, int], ...], sizes: _Sizes, *, with_bias: bool) -> bool | str:
    """Return whether the weight is (in, out), or say why the forward of ``cls`` is no product."""
    known, key = _FORMS.setdefault(cls, {}), (numbers, sizes.small, with_bias)
    if key not in known:
        causes = []
        for transposed in (False, True):
            if (cause := _try_product(cls, dict(numbers), sizes.small, transposed, with_bias)) is None:
                known[key] = transposed
                break
            causes.append(cause)
        else:
            # The way in which it gets furthest is the one that was meant.
            known[key] = next((cause for cause in causes if cause.startswith("it reads")), causes[0])
    return known[key]


def _try_product(
    cls: type[nn.Module], numbers: dict[str, int], sizes: _Sizes, transposed: bool, with_bias: bool
) -> str | None:
    """Say why the forward of ``cls`` is not the product that is meant, or return None if it is."""
    inputs, outputs = sizes if transposed else reversed(sizes)
    # Half precision last: what computes in another dtype inside is no product in float64 either.
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
        for leading in _LEADING:
            with _quiet():
                x, weight, bias = _drawn((*leading, inputs), sizes, (outputs,), dtype=dtype)
                module, causes = _watched(cls, {**numbers, "weight": weight, "bias": bias if with_bias else None})
                try:
                    got = module.forward(x)
                except Exception as error:
                    return causes[0] if causes else f"it raised {type(error).__name__}: {' '.join(str(error).split())}"
                if causes:
                    return causes[0]
                wanted = F.linear(x, weight.t() if transposed else weight, bias if with_bias else None)
                own = (x, weight, bias) if with_bias else (x, weight)
                if cause := _difference(got, wanted, own, bound):
                    return cause
    return None


def _difference(got: Any, wanted: Tensor, inputs: tuple[Tensor, ...], bound: float) -> str | None:
    """Say in what two results differ, or their gradients, or return None."""
    if not isinstance(got, Tensor) or got.shape != wanted.shape or got.dtype != wanted.dtype:
        said = f"{tuple(got.shape)} of {got.dtype}" if isinstance(got, Tensor) else type(got).__name__
        return f"it returns {said}, wanted {tuple(wanted.shape)} of {wanted.dtype}"
    if not torch.allclose(got, wanted, rtol=bound, atol=bound):
        return "it returns other numbers"
    weights = torch.linspace(1, 2, wanted.numel(), dtype=wanted.dtype, device="cpu").view(wanted.shape)
    if not got.requires_grad:
        return "its output needs no gradient"
    pairs = zip(
        torch.autograd.grad(got, inputs, weights, allow_unused=True),
        torch.autograd.grad(wanted, inputs, weights),
        strict=True,
    )
    if any(mine is None or not torch.allclose(mine, own, rtol=bound, atol=8 * bound) for mine, own in pairs):
        return "it has other gradients"
    return None


def _drawn(*shapes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator("cpu").manual_seed(0)
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu") for shape in shapes]
    return [value.to(dtype).requires_grad_() for value in drawn]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Try something without a trace: the caller's modes and generators neither change it nor are changed."""
    with (
        torch.random.fork_rng(devices=()),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        yield


def _watched(cls: type[nn.Module], state: dict[str, Any]) -> tuple[nn.Module, list[str]]:
    """Return a module of the class that has ``state`` and nothing else, and what will have been read besides."""
    causes: list[str] = []

    def read(self: nn.Module, name: str) -> Any:
        if name in state:
            return state[name]
        found = next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)
        if name != "__class__" and not isinstance(found, types.FunctionType):
            causes.append(f"it reads {name!r} too")
            raise RuntimeError(name)  # an AttributeError would be taken for an attribute that is not there
        return object.__getattribute__(self, name)

    made: Any = type(cls.__name__, (cls,), {"__getattribute__": read})
    return object.__new__(made), causes


def lookup_problem(module: nn.Embedding) -> str | None:
    """Say why the forward of an embedding cannot run around a lookup in a split table, or return None if it can.

    It can if it reaches the table by ``super().forward`` alone: what that returns is the same from a split table. Its
    weight may be asked for its dtype, device and sizes.
    """
    kind = type(module).__qualname__
    own = {name for name, p in module._parameters.items() if p is not None}
    if more := sorted(own - {"weight"}):
        return f"{kind} has further parameters ({', '.join(more)}) that would not be used"
    if type(module).forward is nn.Embedding.forward:
        return None
    cause = None
    if module._modules:
        cause = f"it has modules of its own ({', '.join(module._modules)})"
    for training, leading in itertools.product((True, False), _LEADING):
        cause = cause or _try_lookup(module, leading, training=training)
    if cause is None:
        return None
    return f"{kind} has a forward of its own, which does not reach the table by super().forward alone: {cause}"


def _try_lookup(module: nn.Embedding, shape: tuple[int, ...], *, training: bool) -> str | None:
    """Say why the forward does not run around another lookup than its own, or return None if it does."""
    calls = []
    dtype = module.weight.dtype

    class Lookup(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # the native argument name
            calls.append(self)
            return torch.ones((*input.shape, self.embedding_dim), dtype=dtype, device="cpu").requires_grad_()

    made: Any = type(type(module).__name__, (type(module), Lookup), {})
    table = module.weight
    described = types.SimpleNamespace(  # of which only the description may be asked
        dtype=dtype,
        shape=table.shape,
        ndim=table.ndim,
        requires_grad=table.requires_grad,
        device=torch.device("cpu"),
        size=table.size,
        dim=table.dim,
    )
    tried = object.__new__(made)
    tried.__dict__.update(vars(module))
    tried.__dict__.update(
        training=training,
        weight=described,
        _parameters={},
        _modules={},
        _buffers={name: b if b is None else torch.ones_like(b, device="cpu") for name, b in module._buffers.items()},
    )
    with _quiet():
        try:
            tried.forward(torch.zeros(shape, dtype=torch.long, device="cpu"))
        except Exception as error:
            return f"with another table it raised {type(error).__name__}: {' '.join(str(error).split())}"
    return None if calls else "it does not call it"
