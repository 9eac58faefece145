"""Hides the libraries that the core knows nothing of: ``PYTHONPATH=tools/alone``, for a process and all that it starts.

The core's tests then run as they do where only the core and what it requires are installed.
"""

import sys
from importlib.machinery import PathFinder

HIDDEN = frozenset(
    ("accelerate", "datasets", "peft", "sentence_transformers", "timm", "torchvision", "transformers", "trl")
)


class Hiding(PathFinder):
    """Finds what is installed, but for the hidden libraries."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):  # noqa: ANN001, ANN206, D102  # as its base has them
        return None if fullname in HIDDEN else super().find_spec(fullname, path, target)


sys.meta_path[:] = [Hiding if finder is PathFinder else finder for finder in sys.meta_path]
