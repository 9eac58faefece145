"""The head whose logits may stay split over the vocabulary."""

from __future__ import annotations

from typing import Any, Self

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from shardcore.comm.collectives import chunk_bounds, gather_from_tp
from shardcore.errors import NotSupportedError
from shardcore.mesh import ShardContext
from shardcore.nn.linear.parallel import ColumnLinear
from shardcore.nn.loss.cross_entropy import Vocabulary
from shardcore.nn.loss.logits import LazyLogits, VocabParallelLogits

__all__ = ["VocabHead"]


class VocabHead(ColumnLinear):
    """A `ColumnLinear` over the vocabulary whose output is gathered, except where the model keeps its logits split.

    Input (..., H); output (..., V), or `VocabParallelLogits` in calls with labels, which `VocabParallelLossModel`
    recognises. See `ColumnLinear` for the options.
    """

    keeps_split: bool
    #: The number of tokens whose logits are computed at a time, within the loss; None computes all in the head.
    chunk: int | None
    _vocabulary: Vocabulary

    @classmethod
    @override
    def swap_class(cls, module: nn.Module, context: ShardContext, **options: Any) -> Self:
        new = super().swap_class(module, context, **options)
        start, _ = chunk_bounds(new.out_features, context.size, context.rank)
        new.keeps_split, new.chunk = False, None
        new._vocabulary = Vocabulary(context, new.out_features, start)
        return new

    def forward(self, input: Tensor) -> Any:  # noqa: A002  # the native argument name is part of the interface
        """Return (..., V), or split logits.

        Raises:
            NotSupportedError: FSDP2 was given the head by itself.
        """
        if self.keeps_split and isinstance(self, FSDPModule):
            raise NotSupportedError(
                f"fully_shard was called on the head (a {type(self).__name__}) by itself, and takes its weight back "
                "when the head returns; the loss of split logits (parallel_output=True) needs it after that. Leave "
                "the head to the fully_shard of the model, as shard(dp=...) does."
            )
        if self.keeps_split and self.chunk is not None:
            x = input if self.sole_region is None else self.sole_region.enter(input)
            return LazyLogits(x, self._vocabulary, self, self.chunk)
        return self.finish(self.local(input))

    @override
    def finish(self, out: Tensor) -> Any:
        if self.keeps_split:
            return VocabParallelLogits(out, self._vocabulary)
        return gather_from_tp(out, self._shard_context.channel.exact, -1, self.out_features)
