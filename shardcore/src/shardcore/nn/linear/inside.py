"""A row-parallel linear in the middle of a region: local channels read what it returns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from shardcore.comm.collectives import copy_to_tp, reduce_from_tp
from shardcore.comm.dtensor_params import read_local
from shardcore.nn.costs import Collective, Site, backward, forward
from shardcore.nn.linear.parallel import RowLinear
from shardcore.nn.sequence.shard import SequenceShard


class InnerRowLinear(RowLinear):
    """A linear inside of a region whose input features are split, and whose output each rank's channels read again.

    Input (..., in/tp); output (..., out), summed over the ranks. Its gradient is summed over them too, since each
    rank's channels use all of it. The region goes on: random numbers stay those of the rank, and tokens whole.
    """

    @classmethod
    @override
    def plan_collectives(cls, site: Site, **options: Any) -> Iterator[Collective]:
        yield forward(site.path, "all_reduce", "(B, S, ...) output")
        yield backward(site.path, "all_reduce", "(B, S, ...) output gradient")

    @override
    def _take_sequence(self, tokens: SequenceShard | None) -> None:
        """Tokens are whole inside of a region."""

    @override
    def finish(self, out: Tensor) -> Tensor:
        channel = self._shard_context.channel
        out = reduce_from_tp(out, channel, fresh=True)
        if self.bias is not None:
            (bias,) = read_local(self.bias)
            out = out + bias.to(out.dtype)
        return copy_to_tp(out, channel) if torch.is_grad_enabled() else out
