"""Logits that stay split over the vocabulary, as the model's own forward sees them.

A model's forward takes the logits of its head, computes a loss from them in its own way, and returns both. Here the
head returns an object in their place. It is no tensor, but supports what models do with logits: other shapes, wider
dtypes, a scale, a constant bias of words, and `torch.nn.functional.cross_entropy`, which each rank computes for its
part (`shardcore.nn.loss.cross_entropy`). So no forward is overridden, whether the loss is in it, in
``model.loss_function`` or in a rule of the policy. Everything else raises.

At the end of the forward the caller gets a DTensor, split over the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NoReturn, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from typing_extensions import override

from shardcore.comm.collectives import chunk_bounds
from shardcore.errors import NotSupportedError, VocabParallelLogitsError
from shardcore.nn.arguments import Argument
from shardcore.nn.base import ParallelMixin
from shardcore.nn.linear.functional import can_look_at, flat
from shardcore.nn.linear.parallel import ColumnLinear
from shardcore.nn.loss.cross_entropy import Change, Vocabulary, chunked_cross_entropy, split_cross_entropy

_ELSE = (
    "the logits are split over the vocabulary (parallel_output=True), and {what} is not computed on parts of them. "
    "Compute the loss with torch.nn.functional.cross_entropy, take model(...).logits.full_tensor() afterwards, or "
    "shard with parallel_output=False."
)

Share = float  # VocabParallelLogits.float hides the name inside its class


class VocabParallelLogits:
    """Logits (..., V) of which this rank has (..., V/tp).

    Args:
        local: this rank's part.
        vocabulary: how V is split.
    """

    def __init__(self, local: Tensor, vocabulary: Vocabulary) -> None:
        self._local = local
        self._vocabulary = vocabulary

    @property
    def local(self) -> Tensor:
        """This rank's part."""
        return self._local

    @property
    def shape(self) -> torch.Size:
        """The full shape, (..., V)."""
        return torch.Size((*self._local.shape[:-1], self._vocabulary.size))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of this rank's part."""
        return self.local.dtype

    @property
    def device(self) -> torch.device:
        """The device of this rank's part."""
        return self.local.device

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return self._local.ndim

    def dim(self) -> int:
        """Return the number of dims."""
        return self._local.ndim

    def size(self, dim: int | None = None) -> Any:
        """Return the full shape, or one dim of it."""
        return self.shape if dim is None else self.shape[dim]

    def float(self) -> Self:
        """Return itself: sums are in float32, or wider, anyway."""
        return self

    def contiguous(self) -> Self:
        """Return itself."""
        return self

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return itself, unless it is to move: sums are in float32, or wider, whatever the dtype."""
        for value in (*args, kwargs.get("device")):
            if isinstance(value, torch.device | str) and torch.device(value).type != self.device.type:
                self._refuse(f"a move to {value}")
        return self

    def view(self, *shape: Any) -> Self:
        """Return the same logits in another shape, whose last dim is V."""
        wanted = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        # A last dim of -1 stands for the vocabulary only where all others are those that there are.
        if wanted[-1:] != (self._vocabulary.size,) and wanted != (*self.shape[:-1], -1):
            self._refuse(f"a view as {wanted}")
        return self._with_local(self._local.reshape(*wanted[:-1], self._local.size(-1)))

    reshape = view

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Self:
        """Return the same logits with some dims joined, but for the last."""
        if end_dim % self.ndim == self.ndim - 1 and start_dim % self.ndim != self.ndim - 1:
            self._refuse("flattening the vocabulary")
        return self._with_local(self._local.flatten(start_dim, end_dim))

    def transpose(self, first: int, second: int) -> Self:
        """Return the same logits with two dims swapped, neither of which is the last."""
        if self.ndim - 1 in (first % self.ndim, second % self.ndim):
            self._refuse("a transposition of the vocabulary")
        return self._with_local(self._local.transpose(first, second))

    def __getitem__(self, index: Any) -> Self:
        parts = index if isinstance(index, tuple) else (index,)
        reaches = any(part is Ellipsis for part in parts) or len(parts) >= self.ndim
        # A mask takes as many dims as it has.
        masks = any(isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) for part in parts)
        whole_last = parts[-1] is Ellipsis or parts[-1] == slice(None) or (len(parts) == 1 and masks)
        if any(part is None for part in parts) or ((reaches or masks) and not whole_last):
            self._refuse(f"the selection {index!r}")
        return self._with_local(self._local[index])

    def __mul__(self, factor: Any) -> Self:
        return self._elementwise(torch.mul, factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Self:
        return self._elementwise(torch.div, divisor)

    def tanh(self) -> Self:
        """Return the parts of the hyperbolic tangent, of which soft caps are made."""
        return self._elementwise(torch.tanh)

    def __add__(self, bias: Any) -> Self:
        return self.changed(self._own(bias).add)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise VocabParallelLogitsError(
            _ELSE.format(what=f"{name!r}")
        )  # hasattr() and getattr() with a default catch it

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute cross entropies and elementwise functions; refuse all others."""
        first, options = args[0] if args else None, dict(kwargs or {})
        first = options.pop("input", first) if not isinstance(first, VocabParallelLogits) else first
        if isinstance(first, VocabParallelLogits):
            if func is F.cross_entropy:
                return first.cross_entropy(*args[1:], **options)
            if func in (torch.tanh, torch.mul, torch.div):
                return first._elementwise(func, *args[1:], **options)
            if func is torch.add and not options and len(args) == 2:
                return first + args[1]
        raise NotSupportedError(_ELSE.format(what=f"{getattr(func, '__name__', func)}()"))

    def cross_entropy(
        self,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: Share = 0.0,
    ) -> Tensor:
        """Return what `torch.nn.functional.cross_entropy` would of logits (N, V) or (V) and their labels.

        Raises:
            NotSupportedError: weights of classes, probabilities as targets, or logits (N, V, d) with dims after V.
            IndexError: a label is neither in [0, V) nor ignored (checked on the CPU).
        """
        if weight is not None or size_average is not None or reduce is not None:
            self._refuse("a cross entropy with weights, size_average or reduce")
        if target.is_floating_point() or target.shape != self.shape[:-1]:
            self._refuse(f"a cross entropy with targets {tuple(target.shape)} of {target.dtype}")
        if reduction not in ("none", "mean", "sum"):
            raise ValueError(f"{reduction} is not a valid value for reduction")
        labels = target.reshape(-1).long()
        counted = labels != ignore_index
        labels = labels.masked_fill(~counted, 0)
        self._check(labels)
        losses = self._losses(labels, label_smoothing).masked_fill(~counted, 0)
        if reduction == "none":
            return losses.view(target.shape)
        return losses.sum() if reduction == "sum" else losses.sum() / counted.sum()

    def as_dtensor(self) -> Any:
        """Return the logits as the caller of the model gets them: a DTensor split over its last dim.

        A compiled model returns them without a gradient: torch assumes that each DTensor which a graph returns is
        differentiated.
        """
        shape = self.shape
        local = self._local.detach() if torch.compiler.is_compiling() else self._local
        return DTensor.from_local(
            local.contiguous(),
            self._vocabulary.context.tp,
            [Shard(self.ndim - 1)],
            run_check=False,
            shape=shape,
            stride=tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape))),
        )

    def _losses(self, labels: Tensor, smoothing: Share) -> Tensor:
        return split_cross_entropy(flat(self._local), labels, self._vocabulary, smoothing)

    def _check(self, labels: Tensor) -> None:
        if not can_look_at(labels) or not labels.numel():
            return
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= self._vocabulary.size:
            raise IndexError(f"labels from {low} to {high}, but the vocabulary has {self._vocabulary.size} words")

    def _elementwise(self, function: Callable[..., Tensor], *args: Any, **options: Any) -> Self:
        others = [arg for arg in (*args, *options.values()) if isinstance(arg, Tensor)]
        if any(arg.numel() > 1 for arg in others):
            self._refuse("arithmetic with other tensors")
        if any(arg.requires_grad for arg in others):  # its gradient would be a summand
            self._refuse("arithmetic with a number that needs a gradient")
        return self.changed(lambda local: function(local, *args, **options))

    def changed(self, change: Change) -> Self:
        """Return the same logits, of which this rank's are changed."""
        return self._with_local(change(self._local))

    def _own(self, bias: Any) -> Tensor:
        """Return this rank's part of a bias (..., V), such as a buffer that every rank has whole."""
        if not isinstance(bias, Tensor) or isinstance(bias, DTensor) or bias.shape[-1:] != self.shape[-1:]:
            self._refuse("an addition of anything but a plain tensor (..., V)")
        if bias.requires_grad:  # each rank would have a part of its gradient
            self._refuse("an addition of a bias that needs a gradient")
        context = self._vocabulary.context
        start, stop = chunk_bounds(self._vocabulary.size, context.size, context.rank)
        return bias[..., start:stop]

    def _with_local(self, local: Tensor) -> Self:
        """Return the same logits of which this rank has ``local``."""
        return type(self)(local, self._vocabulary)

    def _refuse(self, what: str) -> NoReturn:
        raise NotSupportedError(_ELSE.format(what=what))


class LazyLogits(VocabParallelLogits):
    """Logits that are computed inside the loss, some tokens at a time; the full logits never exist.

    ``x`` is the input of the head, (..., H), which has entered its region. The logits of ``chunk`` tokens are computed
    at a time; ``changes`` are what is done to them, one after the other.
    """

    def __init__(
        self, x: Tensor, vocabulary: Vocabulary, head: ColumnLinear, chunk: int, changes: tuple[Change, ...] = ()
    ) -> None:
        super().__init__(x, vocabulary)  # its own shape but for the last dim is what the logits' would be
        self._head = head
        self._chunk = chunk
        self._changes = changes

    def as_dtensor(self) -> Any:
        """Return itself: all that can be done with it raises."""
        return self

    def _losses(self, labels: Tensor, smoothing: Share) -> Tensor:
        head, x = self._head, flat(self._local)
        return chunked_cross_entropy(
            x, head.weight, head.bias, labels, self._vocabulary, smoothing, chunk=self._chunk, changes=self._changes
        )

    def _own(self, bias: Any) -> Tensor:
        own = super()._own(bias)
        if own.numel() != own.size(-1):
            self._refuse("an addition of one bias for each token, in logits that are computed within the loss")
        return own.reshape(-1)

    @override
    def changed(self, change: Change) -> Self:
        return type(self)(self._local, self._vocabulary, self._head, self._chunk, (*self._changes, change))

    @override
    def _with_local(self, local: Tensor) -> Self:
        return type(self)(local, self._vocabulary, self._head, self._chunk, self._changes)


class VocabParallelLossModel(ParallelMixin):
    """A model whose ``heads`` keep their logits split in calls with ``labels``; without labels they are gathered.

    The logits of ``chunk`` tokens are computed at a time, inside the loss; None computes all in the head.
    """

    keeps_name: ClassVar[bool] = True
    kept_options: ClassVar[Mapping[str, str]] = {
        "labels": "_split_labels",
        "heads": "_split_heads",
        "chunk": "_split_chunk",
    }

    _split_labels: Argument
    _split_heads: tuple[nn.Module, ...]
    _split_chunk: int | None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the native forward; with labels, its logits are DTensors split over the vocabulary."""
        labels = self._split_labels.given(args, kwargs)
        heads: Any = self._split_heads
        before = [head.keeps_split for head in heads]  # True where this is called inside a call with labels
        for head in heads:
            head.keeps_split, head.chunk = labels is not None, self._split_chunk
        try:
            out = super().forward(*args, **kwargs)
        finally:
            for head, kept in zip(heads, before, strict=True):
                head.keeps_split = kept
        return out if labels is None else _for_the_caller(out)


def _for_the_caller(out: Any) -> Any:
    """Replace split logits in what a forward returned."""
    if isinstance(out, VocabParallelLogits):
        return out.as_dtensor()
    if isinstance(out, tuple) and not isinstance(out, Mapping):
        return tuple(_for_the_caller(item) for item in out)
    if isinstance(out, Mapping):
        for name, value in list(out.items()):
            if isinstance(value, VocabParallelLogits):
                out[name] = value.as_dtensor()  # type: ignore[index]  # outputs of models are ordered dicts
    return out
