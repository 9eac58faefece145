"""What became of a switch of the configuration that leaves a choice."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Choice"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What became of a switch that leaves a choice.

    Attributes:
        switch: the field of the configuration.
        outcome: what was chosen, with the reason if it is less than wished for.
    """

    switch: str
    outcome: str

    def __str__(self) -> str:
        return f"{self.switch}: {self.outcome}"
