"""The last linear of a network that makes a bias for each head of coordinates, not of activations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

from torch import Tensor, nn
from typing_extensions import override

from shardcore.mesh.context import ShardContext
from shardcore.nn.costs import Collective, Site
from shardcore.nn.linear.parallel import ColumnLinear


class BiasLinear(ColumnLinear):
    """A column linear inside of a region whose input did not enter it: weight (out/tp, in).

    Input (..., in), the same on all ranks, made by modules whose gradients are summed over them; output (..., out/tp).
    Nothing is sent.
    """

    @classmethod
    @override
    def plan_enters(cls, **options: Any) -> bool:
        return False

    @classmethod
    @override
    def plan_on_split_tokens(cls, **options: Any) -> str | None:
        return None

    @classmethod
    @override
    def plan_collectives(cls, site: Site, **options: Any) -> Iterator[Collective]:
        return iter(())

    @classmethod
    @override
    def swap_class(cls, module: nn.Module, context: ShardContext, **options: Any) -> Self:
        return super().swap_class(module, context, enters=False)

    @override
    def local(self, x: Tensor) -> Tensor:
        return self.product(x)
