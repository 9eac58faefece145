"""Models whose captured outputs (attention weights) are made whole again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from torch import Tensor, nn

from shardcore.comm.collectives import gather_from_tp
from shardcore.mesh import ShardContext
from shardcore.nn.base import SwappedModule

__all__ = ["GathersOutputs"]


class GathersOutputs(SwappedModule):
    """A model that collects outputs of its layers and returns them, each gathered over the ranks.

    Only what the caller asked for is there to gather, so nothing is paid otherwise; gathering in each layer would be.
    Gradients through gathered outputs are exact. A tuple (``return_dict=False``) is made from the named outputs.

    Options:
        dims: (name, dim, full size) for each output that holds this rank's part.
    """

    keeps_name: ClassVar[bool] = True
    option_names: ClassVar[frozenset[str]] = frozenset({"dims"})

    _dims: tuple[tuple[str, int, int], ...]
    _shard_context: ShardContext

    @classmethod
    def adopt(
        cls, module: nn.Module, context: ShardContext, *, dims: tuple[tuple[str, int, int], ...] = (), **options: Any
    ) -> Self:
        """See `SwappedModule.adopt`."""
        new = super().adopt(module, context)
        new._dims = dims
        return new

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the native forward and gather what it captured."""
        by_default = getattr(getattr(self, "config", None), "return_dict", True)
        as_tuple = not kwargs.get("return_dict", by_default)
        if as_tuple:
            kwargs["return_dict"] = True
        out = super().forward(*args, **kwargs)
        for name, dim, size in self._dims:
            captured = out.get(name) if isinstance(out, Mapping) else getattr(out, name, None)
            if captured:
                out[name] = tuple(self._whole(t, dim, size) for t in captured)
        return out.to_tuple() if as_tuple else out

    def _whole(self, captured: Tensor | None, dim: int, size: int) -> Tensor | None:
        # None where an attention implementation returns no weights.
        return None if captured is None else gather_from_tp(captured, self._shard_context.group, dim, size)
