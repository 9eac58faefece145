"""What a parallel linear takes over from the module that it was."""

from __future__ import annotations

from typing import Any, Self

from torch import Tensor, nn
from typing_extensions import override

from shardcore.mesh import ShardContext
from shardcore.nn.base import ParallelMixin
from shardcore.nn.linear.alike import Product, product_of
from shardcore.nn.mixin import native_class

__all__ = ["ParallelLinear"]


class ParallelLinear(ParallelMixin):
    """What column and row linears have in common: the native module is a `torch.nn.Linear`, or computes what one does.

    A class of another library whose forward is the same product (FalconLinear), or that of a weight (in, out)
    (Conv1D), is recognized by trying it (`shardcore.nn.linear.alike`).
    """

    in_features: int
    out_features: int
    weight: Tensor
    bias: Tensor | None
    #: Whether the weight is (in, out), not (out, in).
    transposed: bool
    _shard_context: ShardContext

    @classmethod
    @override
    def plan_kind_problem(cls, module: nn.Module) -> str | None:
        if isinstance(product := product_of(module), Product):
            return None
        given = f"{type(module).__module__}.{type(module).__qualname__}"
        return (
            f"{cls.__name__} replaces torch.nn.modules.linear.Linear, got {given}, which does not compute the same: "
            f"{product}; replicate it, or bring a ParallelModule for it"
        )

    @staticmethod
    def computes(module: nn.Module) -> Product:
        """Return what a module multiplies, of which `plan_kind_problem` was None before it got mixins."""
        found = product_of(module, native_class(type(module)))
        assert isinstance(found, Product)
        return found

    @classmethod
    @override
    def swap_class(cls, module: nn.Module, context: ShardContext, **options: Any) -> Self:
        product = cls.computes(module)
        new = super().swap_class(module, context)
        new.in_features, new.out_features = product.in_features, product.out_features
        new.transposed = product.transposed
        return new

    __repr__ = nn.Module.__repr__

    def extra_repr(self) -> str:
        """Describe the full linear and the number of ranks."""
        form = ", weight=(in, out)" if self.transposed else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}{form}, "
            f"tp={self._shard_context.size}"
        )
