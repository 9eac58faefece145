"""Cross entropy of logits that are split over the vocabulary, without gathering them.

From its part of the logits each rank computes the largest logit, the sum of exponentials and the label's logit; two
all-reduces of one number (or three) for each token combine them (Megatron-LM, Shoeybi et al. 2019,
https://arxiv.org/abs/1909.08053, section 3). The backward needs none. `chunked_cross_entropy` computes the logits too,
some tokens at a time, and again in the backward, so that the full logits never exist (after Wijmans et al. 2024,
https://arxiv.org/abs/2411.09009).

Sums are in float32 where logits are of half precision, else in the logits' own dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from shardcore.comm.collectives import refuse_double_backward
from shardcore.comm.dtensor_params import local_tensor, spec_of, with_spec
from shardcore.comm.gradients import LEAVES
from shardcore.mesh.context import ShardContext
from shardcore.nn.linear.functional import autocast

#: A function of logits that treats each by itself.
Change = Callable[[Tensor], Tensor]


class Vocabulary(NamedTuple):
    """How the vocabulary of one head is split.

    Attributes:
        context: of the sharded model.
        size: the size of the full vocabulary, V.
        start: the first id of this rank; the size of its part is that of its logits.
    """

    context: ShardContext
    size: int
    start: int


_ROWS = 8192  # of a weight gradient that is rounded before it is added up


class _Partial(NamedTuple):
    """What the logits of one rank contribute for some tokens; each is (N,)."""

    highest: Tensor  # of the logits
    exponentials: Tensor  # sum of exp(logit - highest)
    chosen: Tensor  # the logit of the label, where this rank has that word, else 0
    total: Tensor | None  # sum of the logits; for label smoothing only


def wide(x: Tensor) -> Tensor:
    """Return ``x`` in the dtype of sums."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _own(labels: Tensor, vocabulary: Vocabulary, width: int) -> tuple[Tensor, Tensor]:
    """Return the labels as columns of this rank's logits, and which of them are in its part."""
    columns = labels - vocabulary.start
    mine = (columns >= 0) & (columns < width)
    return columns.masked_fill(~mine, 0), mine


def _look(logits: Tensor, labels: Tensor, vocabulary: Vocabulary, smoothing: float) -> _Partial:
    """Return what this rank's ``logits`` (N, V/tp) contribute to the losses of its tokens."""
    logits = wide(logits)
    highest = logits.amax(-1).clamp(min=torch.finfo(logits.dtype).min)  # all words of a rank may be at -inf
    columns, mine = _own(labels, vocabulary, logits.size(-1))
    return _Partial(
        highest,
        (logits - highest.unsqueeze(-1)).exp_().sum(-1),
        logits.gather(-1, columns.unsqueeze(-1)).squeeze(-1).masked_fill(~mine, 0),
        logits.sum(-1) if smoothing else None,
    )


def _losses(partial: _Partial, vocabulary: Vocabulary, smoothing: float) -> tuple[Tensor, Tensor]:
    """Combine the parts of all ranks: return the loss of each token and its log-sum-exp."""
    channel = vocabulary.context.channel.exact
    highest = channel.all_reduce_max(partial.highest.clone())
    own = partial.exponentials * (partial.highest - highest).exp()
    summands = [own, partial.chosen] + ([] if partial.total is None else [partial.total])
    exponentials, chosen, *total = channel.all_reduce(torch.stack(summands)).unbind(0)
    normalizer = highest + exponentials.log()
    losses = normalizer - chosen
    if smoothing:
        losses = (1 - smoothing) * losses + smoothing * (normalizer - total[0] / vocabulary.size)
    return losses, normalizer


def _gradient(
    logits: Tensor, labels: Tensor, normalizer: Tensor, grads: Tensor, vocabulary: Vocabulary, smoothing: float
) -> Tensor:
    """Return the gradient of ``logits`` (N, V/tp) in their dtype; ``grads`` (N) is that of the losses."""
    columns, mine = _own(labels, vocabulary, logits.size(-1))
    grad = (wide(logits) - normalizer.unsqueeze(-1)).exp_()
    if smoothing:
        grad -= smoothing / vocabulary.size
    # The label's own word; ranks that do not have it subtract nothing.
    grad.scatter_add_(-1, columns.unsqueeze(-1), ((smoothing - 1) * mine.to(grad.dtype)).unsqueeze(-1))
    return grad.mul_(grads.unsqueeze(-1)).to(logits.dtype)


class _VocabCrossEntropy(Function):
    flow = LEAVES

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocabulary: Vocabulary, smoothing: float) -> Tensor:
        losses, normalizer = _losses(_look(logits, labels, vocabulary, smoothing), vocabulary, smoothing)
        ctx.save_for_backward(logits, labels, normalizer)
        ctx.vocabulary, ctx.smoothing = vocabulary, smoothing
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        refuse_double_backward()
        logits, labels, normalizer = ctx.saved_tensors
        return _gradient(logits, labels, normalizer, grads[0], ctx.vocabulary, ctx.smoothing), None, None, None


def _add_product(total: Tensor, grad: Tensor, x: Tensor) -> None:
    """Add the weight gradient of some tokens, (V, H) from (n, V) and (n, H)."""
    if total.dtype == grad.dtype:
        total.addmm_(grad.t(), x)
        return
    for rows, some in zip(total.split(_ROWS), grad.split(_ROWS, -1), strict=True):  # no second gradient of that size
        rows.add_(some.t() @ x)


def _changed(logits: Tensor, changes: tuple[Change, ...]) -> Tensor:
    for change in changes:
        logits = change(logits)
    return logits


class _ChunkedCrossEntropy(Function):
    flow = LEAVES

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        vocabulary: Vocabulary,
        smoothing: float,
        chunk: int,
        changes: tuple[Change, ...],
    ) -> Tensor:
        w, b = local_tensor(weight), None if bias is None else local_tensor(bias)
        ctx.input_dtype = x.dtype
        if torch.is_autocast_enabled(x.device.type):
            x, w, b = autocast(x, w, b)
        parts = [
            _look(_changed(F.linear(some, w, b), changes), own, vocabulary, smoothing)
            for some, own in zip(x.split(chunk), labels.split(chunk), strict=True)
        ]
        joined = [None if column[0] is None else torch.cat(column) for column in zip(*parts, strict=True)]
        losses, normalizer = _losses(_Partial(*joined), vocabulary, smoothing)  # type: ignore[arg-type]  # total alone is None
        ctx.save_for_backward(x, w, b, labels, normalizer)
        ctx.parameters = weight, bias
        ctx.vocabulary, ctx.smoothing, ctx.chunk, ctx.changes = vocabulary, smoothing, chunk, changes
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        x, w, b, labels, normalizer = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        weight, bias = ctx.parameters
        gx = torch.empty_like(x) if needs_x else None
        # Summed over chunks, each of which is rounded.
        gw = torch.zeros_like(w, dtype=torch.promote_types(w.dtype, torch.float32)) if needs_weight else None
        gb = torch.zeros_like(b, dtype=torch.promote_types(b.dtype, torch.float32)) if needs_bias else None
        for start in range(0, x.size(0), ctx.chunk):
            some = slice(start, start + ctx.chunk)
            product = F.linear(x[some], w, b)
            with torch.enable_grad():
                logits = _changed(product.requires_grad_(bool(ctx.changes)), ctx.changes)
            grad = _gradient(
                logits.detach(), labels[some], normalizer[some], grads[0][some], ctx.vocabulary, ctx.smoothing
            )
            if ctx.changes:
                (grad,) = torch.autograd.grad(logits, product, grad)
            del logits, product
            if gx is not None:
                torch.mm(grad, w, out=gx[some])
            if gw is not None:
                _add_product(gw, grad, x[some])
            if gb is not None:
                gb += grad.sum(0)
        return (
            None if gx is None else gx.to(ctx.input_dtype),
            None if gw is None else with_spec(gw.to(weight.dtype), spec_of(weight)),
            None if gb is None else with_spec(gb.to(bias.dtype), spec_of(bias)),
            *(None,) * 5,
        )


def split_cross_entropy(logits: Tensor, labels: Tensor, vocabulary: Vocabulary, smoothing: float = 0.0) -> Tensor:
    """Return the loss of each token, (N), from this rank's ``logits`` (N, V/tp) and ``labels`` (N) in [0, V)."""
    return _VocabCrossEntropy.apply(logits, labels, vocabulary, smoothing)  # type: ignore[no-untyped-call, no-any-return]  # untyped in torch


def chunked_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    vocabulary: Vocabulary,
    smoothing: float = 0.0,
    *,
    chunk: int,
    changes: tuple[Change, ...] = (),
) -> Tensor:
    """Return the loss of each token, (N), from what enters the head.

    Args:
        x: the head's input, (N, H), which has entered its region.
        weight: the head's DTensor parameter, (V, H), split over V.
        bias: its bias, (V), split likewise, or None.
        labels: (N), in [0, V).
        vocabulary: how V is split.
        smoothing: the label smoothing: the share of the loss that is spread over the vocabulary.
        chunk: the number of tokens whose logits are computed at a time.
        changes: what is done to each word's logit by itself, one after the other: functions of this rank's logits
            (n, V/tp) of some tokens, without parameters.
    """
    return _ChunkedCrossEntropy.apply(x, weight, bias, labels, vocabulary, smoothing, chunk, changes)  # type: ignore[no-untyped-call, no-any-return]  # untyped in torch
