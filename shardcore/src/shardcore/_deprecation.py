"""How a public name says that it goes: one form of words, for all of them. Imports the errors alone."""

from __future__ import annotations

import warnings

from shardcore.errors import ShardcoreDeprecationWarning

__all__ = ["warn_deprecated"]


def warn_deprecated(name: str, *, since: str, instead: str, removed: str, stacklevel: int = 3) -> None:
    """Warn that ``name`` goes.

    Args:
        name: as its users write it, such as ``shardcore.policy.Policy``.
        since: the release that deprecated it.
        instead: what to write in its place.
        removed: the first release without it.
        stacklevel: frames from here to the caller of ``name``; 3 if the deprecated function calls this one.
    """
    text = f"{name} is deprecated since shardcore {since} and goes in release {removed}: use {instead}"
    warnings.warn(text, ShardcoreDeprecationWarning, stacklevel=stacklevel)
