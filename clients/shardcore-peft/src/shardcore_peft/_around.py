"""The layer of PEFT around a base that finishes: what the adapter adds joins what this rank has, before the one sum."""

from __future__ import annotations

import copy
from typing import Any, ClassVar, Self

from torch import Tensor, nn
from typing_extensions import override

from shardcore.errors import WrapError
from shardcore.mesh.context import ShardContext
from shardcore.nn import ColumnLinear, ParallelMixin, RowLinear


class _Unfinished(nn.Module):
    """Stands for a base while the layer around it runs: it returns what this rank has, and has the base's attributes.

    The base is not one of its modules: parameters are found in one place only.
    """

    def __init__(self, base: ColumnLinear | RowLinear) -> None:
        super().__init__()
        self.__dict__["_base"] = base

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's part, or summand, of what the base returns."""
        base: ColumnLinear | RowLinear = self.__dict__["_base"]
        return base.local(x)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Unfinished:
        # Its own: the base's, which an attribute would be looked up as, makes a base.
        new = memo[id(self)] = _Unfinished(copy.deepcopy(self.__dict__["_base"], memo))
        return new

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_base"], name)


def whole_base(base: nn.Module) -> nn.Module:
    """Return the base of a layer of PEFT, as which another module may stand while the layer runs."""
    found: nn.Module = base.__dict__["_base"] if isinstance(base, _Unfinished) else base
    return found


class Finishing(ParallelMixin):
    """A layer of PEFT around a row linear, or a column linear that gathers: the base finishes after the adapter.

    While the layer's own forward runs, another module stands in the place of its base; at all other times the base is
    there, as an unsharded model has it, so that merging and unloading find it.
    """

    keeps_name: ClassVar[bool] = True

    _shard_unfinished: _Unfinished
    _modules: dict[str, nn.Module | None]

    @classmethod
    @override
    def swap_class(cls, module: nn.Module, context: ShardContext, **options: Any) -> Self:
        new = super().swap_class(module, context)
        base: Any = module.base_layer
        new.__dict__["_shard_unfinished"] = _Unfinished(base)
        return new

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the native forward on what this rank has, then let the base finish."""
        base = self._modules["base_layer"]
        if not isinstance(base, RowLinear | ColumnLinear):
            raise WrapError(
                f"the base of this {type(self).__name__} is a {type(base).__name__} now, not what shard() had made; "
                "put it back, or build the model anew"
            )
        self._modules["base_layer"] = self.__dict__["_shard_unfinished"]
        try:
            own = base.part_of(x) if isinstance(base, RowLinear) else x
            out = super().forward(own, *args, **kwargs)
        finally:
            self._modules["base_layer"] = base
        return base.finish(out)
