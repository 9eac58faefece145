"""What became of a wish of the configuration that leaves a choice."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "Choice",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What became of a wish that leaves a choice.

    Attributes:
        wish: the field of the configuration.
        outcome: what was chosen, with the reason if it is less than wished for.
    """

    wish: str
    outcome: str

    def __str__(self) -> str:
        return f"{self.wish}: {self.outcome}"
