"""How the switches of the configuration that leave a choice were decided."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Choice"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How a switch that leaves a choice was decided.

    Attributes:
        switch: the field of the configuration.
        outcome: what was chosen, with the reason if something was left out.
    """

    switch: str
    outcome: str

    def __str__(self) -> str:
        return f"{self.switch}: {self.outcome}"
