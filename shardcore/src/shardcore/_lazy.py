"""Public names of a package that are loaded on first use (PEP 562), so that importing it imports nothing heavy."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence


def on_first_use(package: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], object]:
    """Return the ``__getattr__`` of a package; ``homes`` has by module the public names that it defines.

    It is hidden from type checkers, which would otherwise take every misspelled name for one that exists.
    """
    home = {name: module for module, names in homes.items() for name in names}

    def load(name: str) -> object:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(home[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return load
