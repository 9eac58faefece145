"""Rules as their authors wrote them, for messages."""

from __future__ import annotations

from typing import Any

__all__ = ["names_of", "written"]


def written(word: str, *names: Any, **named: Any) -> str:
    """Return a call of ``word`` as it is written in a policy; named arguments that are None are left out."""
    parts = [repr(n) if isinstance(n, str) else str(n) for n in names]
    parts += [f"{key}={value!r}" for key, value in named.items() if value is not None]
    return f"{word}({', '.join(parts)})"


def names_of(names: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return one name, or several, as a tuple."""
    return (names,) if isinstance(names, str) else tuple(names)
