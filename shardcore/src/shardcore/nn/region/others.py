"""The arguments that come into a region beside the one that enters it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from shardcore.errors import NotSupportedError
from shardcore.nn.region.contents import needs_gradient
from shardcore.nn.region.summed import shared_source

__all__ = ["OtherArguments"]


class OtherArguments:
    """Refuses arguments of the module at which a region is entered whose gradient would be this rank's summand.

    Args:
        argument: name and position of the argument that enters.
        also: names and positions of those that have entered elsewhere.
        local: names and positions of those that hold what this rank alone has.
    """

    def __init__(
        self, argument: tuple[str, int], also: Iterable[tuple[str, int]], local: Iterable[tuple[str, int]]
    ) -> None:
        self._name, self._position = argument
        self._local = {name for name, _ in local}
        self._at = {position: name for name, position in (*also, *local)}
        self._known = set(self._at.values())

    def check(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse what would get a partial gradient.

        Raises:
            NotSupportedError: an argument would.
        """
        for name, shown, value in self._others(args, kwargs):
            if name in self._known:
                source = shared_source(value, local=name in self._local) if isinstance(value, Tensor) else None
                if source is not None:
                    raise NotSupportedError(
                        f"{type(module).__name__}: the gradient of the argument {shown} would reach {source} as this "
                        "rank's summand: also= is for what an enter_arg above has entered, local= and partial=True "
                        "for what is made of this rank's parameters (by_heads, partial) or inside of regions. Correct "
                        "the region's rule in the policy."
                    )
            elif (place := needs_gradient(value)) is not None:
                inside = f" (its {place})" if place else ""
                raise NotSupportedError(
                    f"{type(module).__name__}: the argument {shown} needs a gradient{inside}, but only {self._name!r} "
                    "enters its tensor-parallel region: the gradient of another would be this rank's summand. Name it "
                    "in the policy: in also= with an enter_arg above if every rank has all of it, in local= if it "
                    "holds this rank's heads, with slice_arg before if it holds all heads. Or detach it."
                )

    def _others(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
        """Yield name, name for messages, and value of each argument but the one that enters."""
        for i, value in enumerate(args):
            if i != self._position or self._name in kwargs:
                name = self._at.get(i, "")
                yield name, repr(name) if name else f"at position {i}", value
        for name, value in kwargs.items():
            if name != self._name:
                yield name, repr(name), value
