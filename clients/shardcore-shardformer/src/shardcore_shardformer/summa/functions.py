"""What functions of torch do with tensors that are divided over a square of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_any, tree_map_only

from shardcore.errors import NotSupportedError
from shardcore_shardformer.summa.products import COLUMNS, ROWS, Embedding, Linear, laid_out, normalized
from shardcore_shardformer.tensor.colo import SERVED as OF_COLO_TENSORS

#: What DTensor computes as the whole does, with its gradient, in the divisions that occur here; not the product of a
#: GPT-2's `Conv1D`, whose backward DTensor cannot view.
SERVED = (OF_COLO_TENSORS - {"addmm"}) | {
    "__getitem__", "expand", "flatten", "reshape", "squeeze", "type_as", "unflatten", "view",
}  # fmt: skip
#: Those that can be told to work in place by position too.
_INPLACE = frozenset(("leaky_relu", "relu", "silu"))
#: What says something of a tensor, and computes nothing.
_TOLD = frozenset((
    "__get__", "__set__", "__delete__",
    "dim", "size", "numel", "__len__", "stride", "is_contiguous", "is_floating_point", "is_complex", "element_size",
    "get_device", "requires_grad_", "retain_grad", "register_hook", "__hash__", "__format__", "__repr__",
))  # fmt: skip
#: Functions of a whole output, which every rank gets first.
OF_WHOLE = frozenset((
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "cross_entropy", "huber_loss",
    "kl_div", "l1_loss", "mse_loss", "nll_loss", "smooth_l1_loss",
))  # fmt: skip


class Divided(TorchFunctionMode):
    """While it is active, functions of torch take tensors that are divided over a square.

    Linears, embeddings, norms over features and attention are those of `shardcore_shardformer.summa.products`; other
    functions are DTensor's. A plain tensor is the same on all ranks. Gradients of parameters come to their placements.

    Args:
        where: what runs now, for errors.

    Raises:
        NotSupportedError: it is not known that parts compute a function as the whole does.
    """

    def __init__(self, where: Callable[[], str]) -> None:
        super().__init__()
        self._where = where

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Compute with divided tensors."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", str(func))
        if name in _TOLD or not has_divided((args, kwargs)):
            return func(*args, **kwargs)
        try:
            return self._computed(func, name, args, kwargs)
        except _NotServedError as error:
            raise refusal(str(error), self._where()) from None
        except RuntimeError as error:  # of DTensor, about the division
            error.add_note(f"tensor_parallel_mode='2d': this is {name} in {self._where()}, on what a square divides")
            raise

    def _computed(self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (own := _OWN.get(name)) is not None:
            return own(*args, **kwargs)
        if name in OF_WHOLE:
            wholes = tree_map_only(DTensor, whole, (args, kwargs))
            return func(*wholes[0], **wholes[1])
        if name not in SERVED or kwargs.get("out") is not None:
            raise _NotServedError(name)
        if kwargs.get("inplace") or (name in _INPLACE and any(value is True for value in args)):
            raise _NotServedError(f"{name} in place")
        mesh = _mesh((args, kwargs))
        read = tree_map_only(Tensor, lambda tensor: _read(tensor, mesh), (args, kwargs))
        return func(*read[0], **read[1])


class _NotServedError(Exception):
    """What is not served."""


def refusal(what: str, where: str) -> NotSupportedError:
    """Return the error for something that is not served."""
    return NotSupportedError(
        f"tensor_parallel_mode='2d': {what} in {where} is not served on tensors that a square of ranks divides; "
        "linears, norms, embeddings and elementwise functions are. Use tensor_parallel_mode='1d' for this model"
    )


def has_divided(tree: Any) -> bool:
    """Tell whether there is a DTensor among the leaves of ``tree``."""
    return tree_any(lambda value: isinstance(value, DTensor), tree)


def whole(x: DTensor) -> Tensor:
    """Return all of ``x`` on every rank, as a plain tensor; each rank's gradient of it has to be the same."""
    return x.redistribute(placements=(Replicate(), Replicate())).to_local()


def _mesh(tree: Any) -> DeviceMesh:
    found: list[DTensor] = []
    tree_map_only(DTensor, found.append, tree)
    return found[0].device_mesh


def _read(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return ``tensor`` as a DTensor whose gradient comes to its own placements, as an optimizer needs it."""
    if not isinstance(tensor, DTensor):
        return DTensor.from_local(tensor, mesh, (Replicate(), Replicate()), run_check=False)
    return tensor.redistribute(placements=tensor.placements) if tensor.requires_grad else tensor


def _both(x: Tensor, weight: Tensor) -> tuple[DTensor, DTensor]:
    mesh = _mesh((x, weight))
    return laid_out(_read(x, mesh)), laid_out(_read(weight, mesh))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> DTensor:  # noqa: A002  # torch's name
    if input.ndim < 2:
        raise _NotServedError("a linear of a single vector")
    x, weight = _both(input, weight)
    out: Any = Linear.apply(x, weight)  # type: ignore[no-untyped-call]  # untyped in torch
    return cast("DTensor", out if bias is None else out + _read(bias, x.device_mesh))


def _embedding(
    input: Tensor,  # noqa: A002  # torch's name
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> DTensor:
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise _NotServedError("an embedding with max_norm, scale_grad_by_freq or sparse")
    ids = whole(input) if isinstance(input, DTensor) else input
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]
    out: Any = Embedding.apply(laid_out(_read(weight, _mesh((input, weight)))), ids, padding_idx)  # type: ignore[no-untyped-call]  # untyped in torch
    return cast("DTensor", out)


def _norm(
    centers: bool,
    x: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | None = 1e-5,
) -> DTensor:
    if len(normalized_shape) != 1 or x.ndim < 2:
        raise _NotServedError("a norm over several dims")
    mesh = _mesh((x, weight, bias))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    weight, bias = (None if value is None else _read(value, mesh) for value in (weight, bias))
    return normalized(_read(x, mesh), weight, bias, eps, centers)


def _layer_norm(input: Tensor, normalized_shape: Any, *args: Any, **kwargs: Any) -> DTensor:  # noqa: A002
    return _norm(True, input, tuple(normalized_shape), *args, **kwargs)


def _rms_norm(
    input: Tensor,  # noqa: A002  # torch's name
    normalized_shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> DTensor:
    return _norm(False, input, tuple(normalized_shape), weight, None, eps)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: A002
    if training and p > 0:
        raise _NotServedError(f"dropout (p={p}; call model.eval(), or set it to 0)")
    return input


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> DTensor:
    """Attend within each rank's own sequences (along rows) and heads (along columns): nothing is sent."""
    if dropout_p > 0:
        raise _NotServedError(f"attention with dropout (p={dropout_p}; call model.eval(), or set it to 0)")
    mesh = _mesh((query, key, value, attn_mask))
    every = [_read(tensor, mesh) for tensor in (query, key, value)]
    if query.ndim != 4:
        raise _NotServedError(f"attention of {query.ndim} dims")
    rows, heads = mesh.size(ROWS), mesh.size(COLUMNS)
    over = (
        Shard(0) if all(x.shape[0] % rows == 0 for x in every) else Replicate(),
        Shard(1) if all(x.shape[1] % heads == 0 for x in every) else Replicate(),
    )
    q, k, v = (x.redistribute(placements=over).to_local() for x in every)
    if attn_mask is not None:
        mask = _read(attn_mask, mesh)
        splits = [mask.ndim == 4 and isinstance(p, Shard) and mask.shape[p.dim] > 1 for p in over]
        lies = [p if split else Replicate() for p, split in zip(over, splits, strict=True)]
        # Of a mask that is the same for all, each rank has the gradient from its own sequences and heads.
        grads = [lie if lie == p else Partial() for lie, p in zip(lies, over, strict=True)]
        attn_mask = mask.redistribute(placements=lies).to_local(grad_placements=grads)
    part = F.scaled_dot_product_attention(q, k, v, attn_mask, is_causal=is_causal, **options)
    return DTensor.from_local(part, mesh, over, run_check=False)


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    filled = [tensor for tensor in tensors if tensor.shape != (0,)]  # which torch leaves out, as caches begin
    mesh = _mesh(filled)
    return torch.cat([_read(tensor, mesh) for tensor in filled], dim)


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    mesh = _mesh(tensors)  # torch.stack of divided tensors is another tensor before torch 2.13
    return torch.cat([_read(tensor, mesh).unsqueeze(dim) for tensor in tensors], dim)


def _chunk(input: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:  # noqa: A002  # torch's name
    return _split(input, -(-input.shape[dim] // chunks), dim)


def _split(tensor: Tensor, split_size_or_sections: int | list[int], dim: int = 0) -> tuple[Tensor, ...]:
    # Each part by itself: the backward of torch.split makes plain zeros for those that were not used.
    x, size, sizes = _read(tensor, _mesh(tensor)), tensor.shape[dim], split_size_or_sections
    if isinstance(sizes, int):
        sizes = [min(sizes, size - first) for first in range(0, size, sizes)]
    if sum(sizes) != size:
        raise ValueError(f"split of a size of {size} into {sizes}")
    return tuple(
        x.narrow(dim, end - length, length) for length, end in zip(sizes, itertools.accumulate(sizes), strict=True)
    )


_OWN: dict[str, Callable[..., Any]] = {
    "cat": _cat,
    "chunk": _chunk,
    "dropout": _dropout,
    "embedding": _embedding,
    "layer_norm": _layer_norm,
    "linear": _linear,
    "rms_norm": _rms_norm,
    "scaled_dot_product_attention": _attention,
    "split": _split,
    "stack": _stack,
}
