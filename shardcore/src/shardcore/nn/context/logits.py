"""Logits of the tokens of one rank of ``cp``, as the model's own forward sees them.

The labels of a model are whole, and models shift them: which logit belongs to which label depends on what the forward
does with both. So each rank follows where its logits are among all while the forward gives them other shapes, and takes
the labels of its own in the end. Losses are put together, one number for each token, and what follows (a mean over the
labels that count, ``num_items_in_batch``) is computed alike by all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from shardcore.comm.collectives import gather_from_tp
from shardcore.nn.base import ParallelMixin
from shardcore.nn.context.places import Places, sum_of_ranks
from shardcore.nn.context.shard import ContextShard
from shardcore.nn.loss.cross_entropy import Change, Vocabulary, wide
from shardcore.nn.loss.logits import LazyLogits, VocabParallelLogits


class DividedLogits(VocabParallelLogits):
    """Logits (B, S, V) of which this rank has those of its own tokens, in rows.

    Args:
        where: the row of each logit, (B, S, 1) or what became of that; -1 where another rank has it.
        vocabulary: how V is split.
        rows: this rank's logits, (R, V), or with V split (R, V/tp).
        shard: how tokens are divided.
        order: (R), of the logits in their order, those of this rank, as long as none was left out; else None.
    """

    def __init__(
        self,
        where: Tensor,
        vocabulary: Vocabulary,
        rows: Tensor | VocabParallelLogits,
        shard: ContextShard,
        order: Tensor | None,
    ) -> None:
        super().__init__(where, vocabulary)
        self._rows, self._shard, self._order = rows, shard, order

    @classmethod
    def of(cls, out: Any, places: Places, shard: ContextShard) -> Self:
        """Return the logits that a head made of this rank's tokens, (B, L, V)."""
        split = isinstance(out, VocabParallelLogits)
        batch, tokens, size = out.shape
        device = "cpu" if out.device.type == "meta" else out.device  # of those of another stage it is known too
        count = functools.partial(torch.arange, device=device)
        own = torch.cat([count(start, stop) for start, stop in places.ranks[shard.rank]])
        order = (count(batch)[:, None] * places.length + own).flatten()
        where = torch.full((batch * places.length,), -1, device=device)
        where[order] = count(batch * tokens)
        vocabulary = out._vocabulary if split else Vocabulary(shard.context, size, 0)
        return cls(where.view(batch, places.length, 1), vocabulary, out.flatten(0, 1), shard, order)

    @property
    @override
    def local(self) -> Tensor:
        """This rank's rows."""
        return self._rows.local if isinstance(self._rows, VocabParallelLogits) else self._rows

    def __getitem__(self, index: Any) -> Self:
        found = super().__getitem__(index)
        found._order = None
        return found

    @override
    def transpose(self, first: int, second: int) -> Self:
        found = super().transpose(first, second)
        found._order = None
        return found

    @override
    def as_dtensor(self) -> Self:
        """Return itself: what its caller gets is decided around the whole model."""
        return self

    @property
    def lazy(self) -> bool:
        """Whether logits are computed inside the loss, and are nowhere."""
        return isinstance(self._rows, LazyLogits)

    def to_local(self) -> Tensor:
        """Return this rank's logits, a row for each of its tokens: (B * L, V), or (B * L, V/tp)."""
        return self.local

    def full_tensor(self) -> Tensor:
        """Return the logits of all tokens and words, (B, S, V), by an all-gather; every rank makes the call."""
        places = self._shard.last
        where, order = self._local, self._order
        whole = places is not None and where.ndim == 3 and where.numel() == self._shard.rows * places.length
        if not whole or places is None or isinstance(self._rows, LazyLogits):
            self._refuse("logits of which the forward has left some out, or computed in the loss, made whole,")
        rows, width = self.local, self._vocabulary.size
        if rows.size(-1) != width:
            rows = gather_from_tp(rows, self._vocabulary.context.channel.exact, -1, width)
        if order is not None and where.size(1) == places.length:
            return self._shard.whole(rows.unflatten(0, (where.size(0), -1)), places)
        # Tokens and rows were swapped: each logit is put in its place.
        own = (where[..., 0] >= 0).nonzero(as_tuple=True)
        made = rows.new_zeros(*where.shape[:2], width).index_put(own, rows[where[own][:, 0]])
        return sum_of_ranks(made, self._shard.groups.everybody)

    @override
    def _losses(self, labels: Tensor, smoothing: float) -> Tensor:
        rows, own = self._rows, self._order
        if own is None:
            where = self._local.reshape(-1)
            own = (where >= 0).nonzero().squeeze(1)
            rows = rows[where[own]]
        if isinstance(rows, VocabParallelLogits):
            losses = rows._losses(labels[own], smoothing)
        else:
            losses = F.cross_entropy(wide(rows), labels[own], reduction="none", label_smoothing=smoothing)
        whole = losses.new_zeros(labels.shape).index_put((own,), losses)
        return sum_of_ranks(whole, self._shard.groups.everybody)

    @override
    def changed(self, change: Change) -> Self:
        rows = self._rows.changed(change) if isinstance(self._rows, VocabParallelLogits) else change(self._rows)
        return self._with(self._local, rows)

    @override
    def _own(self, bias: Any) -> Tensor:
        part = super()._own(bias)  # or a refusal
        own: Tensor = part if isinstance(self._rows, VocabParallelLogits) else bias
        if own.numel() != own.size(-1):
            self._refuse("an addition of anything but one bias of words, of logits that are divided over cp")
        return own.reshape(-1)

    @override
    def _with_local(self, local: Tensor) -> Self:
        return self._with(local, self._rows)

    def _with(self, where: Tensor, rows: Tensor | VocabParallelLogits) -> Self:
        return type(self)(where, self._vocabulary, rows, self._shard, self._order)


class ContextHead(ParallelMixin):
    """A head that computes the logits of this rank's tokens, where the model that is running gives it all of them."""

    keeps_name: ClassVar[bool] = True
    kept_options: ClassVar[Mapping[str, str]] = {"shard": "_context"}

    _context: ContextShard

    def __call__(self, input: Tensor) -> Any:  # noqa: A002  # the native argument name is part of the interface
        """Return the logits of what it is given, or `DividedLogits`."""
        places = self._context.last if self._context.divides_logits else None
        if places is None or input.ndim != 3 or input.size(1) != places.length:
            return super().__call__(input)
        return DividedLogits.of(super().__call__(self._context.own(input, places)), places, self._context)
