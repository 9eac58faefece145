"""Finding the dropouts that may run inside a region."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import nn

__all__ = ["DropoutSites"]

_NAME = re.compile("drop", re.IGNORECASE)


class DropoutSites:
    """The places of some modules that set a dropout probability: dropout modules, and attributes named after it.

    Probabilities are read when asked, so that changing one later is seen. More places than really lie in the region
    are harmless: the random stream is then forked without need.

    Args:
        trees: modules searched with all their submodules.
        blocks: modules of which only the attributes and the dropouts that they hold directly count.
    """

    def __init__(self, trees: Iterable[nn.Module] = (), blocks: Iterable[nn.Module] = ()) -> None:
        self._sites: list[tuple[nn.Module, str]] = []
        for tree in trees:
            for module in tree.modules():
                self._add(module)
        for block in blocks:
            self._add(block)
            for child in block.children():
                if _is_dropout(child):
                    self._add(child)

    def _add(self, module: nn.Module) -> None:
        names = [name for name, value in vars(module).items() if _NAME.search(name) and _is_probability(value)]
        if _is_dropout(module):
            names += [name for name in ("p", "drop_prob") if _is_probability(getattr(module, name, None))]
        self._sites += [(module, name) for name in dict.fromkeys(names) if (module, name) not in self._sites]

    def __len__(self) -> int:
        return len(self._sites)

    def live(self) -> bool:
        """Tell whether a dropout of the sites would draw numbers now."""
        return any(module.training and getattr(module, name) for module, name in self._sites)


def _is_dropout(module: nn.Module) -> bool:
    return "drop" in type(module).__name__.lower()


def _is_probability(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
