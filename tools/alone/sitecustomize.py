"""Hides the libraries that the core knows nothing of: ``PYTHONPATH=tools/alone``, for a process and all that it starts.

The core's tests then run as they do where only the core and what it requires are installed.
"""

import sys
from importlib.machinery import PathFinder
from typing import Any

HIDDEN = frozenset(
    ("accelerate", "datasets", "peft", "sentence_transformers", "timm", "torchvision", "transformers", "trl")
)


class Hiding(PathFinder):
    """Finds what is installed, but for the hidden libraries."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> Any:  # noqa: D102  # as its base does
        return None if fullname in HIDDEN else super().find_spec(fullname, path, target)


sys.meta_path[:] = [Hiding if finder is PathFinder else finder for finder in sys.meta_path]
