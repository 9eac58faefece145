"""Models whose captured outputs (attention weights) are made whole again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
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
        places: outputs that have their place in the native tuple also when they are None.
    """

    keeps_name: ClassVar[bool] = True
    option_names: ClassVar[frozenset[str]] = frozenset({"dims", "places"})

    _dims: tuple[tuple[str, int, int], ...]
    _places: tuple[str, ...]
    _shard_context: ShardContext

    @classmethod
    def adopt(
        cls,
        module: nn.Module,
        context: ShardContext,
        *,
        dims: tuple[tuple[str, int, int], ...] = (),
        places: tuple[str, ...] = (),
        **options: Any,
    ) -> Self:
        """See `SwappedModule.adopt`."""
        new = super().adopt(module, context)
        new._dims = dims
        new._places = places
        return new

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the native forward and gather what it captured."""
        by_default = getattr(getattr(self, "config", None), "return_dict", True)
        wish = kwargs.get("return_dict")
        as_tuple = not (by_default if wish is None else wish)
        if as_tuple:
            kwargs["return_dict"] = True
        out = super().forward(*args, **kwargs)
        for name, dim, size in self._dims:
            captured = out.get(name) if isinstance(out, Mapping) else getattr(out, name, None)
            if captured:
                out[name] = tuple(self._whole(t, dim, size) for t in captured)
        return self._as_tuple(out) if as_tuple else out

    def _as_tuple(self, out: Any) -> tuple[Any, ...]:
        """Return what the native forward returns for ``return_dict=False``."""
        if not self._places:
            return tuple(out.to_tuple())
        values = {field.name: getattr(out, field.name) for field in fields(out)}
        return tuple(value for name, value in values.items() if value is not None or name in self._places)

    def _whole(self, captured: Tensor | None, dim: int, size: int) -> Tensor | None:
        # None where an attention implementation returns no weights.
        return None if captured is None else gather_from_tp(captured, self._shard_context.group, dim, size)
