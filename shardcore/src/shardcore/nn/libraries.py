"""What is known of libraries by those who know them: clients, which `shardcore.clients` finds and asks.

Layers do not know where answers come from. Without clients there are none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class _State:
    answer: Callable[[str, str], Any] = staticmethod(lambda library, what: None)


def answered_by(answer: Callable[[str, str], Any]) -> None:
    """Let ``answer`` be asked from now on: for a library and the name of what is wanted, None where it is not known."""
    _State.answer = staticmethod(answer)


def ask(library: str, what: str) -> Any:
    """Return what the client for a library has under a name, or None; ``""`` asks all clients, and gives a list."""
    return _State.answer(library, what)


def library_of(value: object) -> str:
    """Return the name by which the library is imported that defines the class of ``value``."""
    return type(value).__module__.partition(".")[0]
