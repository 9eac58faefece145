"""The last linear of a network that makes a bias for each head of coordinates, not of activations."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import override

from shardcore.nn.linear.parallel import ColumnLinear


class BiasLinear(ColumnLinear):
    """A column linear inside of a region whose input did not enter it, with ``enters=False``: weight (out/tp, in).

    Input (..., in), the same on all ranks, made by modules whose gradients are summed over them; output (..., out/tp).
    Nothing is sent.
    """

    @override
    def local(self, x: Tensor) -> Tensor:
        return self.product(x)
