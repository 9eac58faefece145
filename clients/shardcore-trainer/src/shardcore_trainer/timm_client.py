"""What the core asks about the optimizers of timm; see `shardcore.clients`. Imports nothing of it."""

from __future__ import annotations

from typing import Any

_WHOLE = "WholeTensors"
_UNABLE = frozenset({"Adafactor", "AdamP", "Kron", "Mars", "NvNovoGrad", "SGDP"})

#: What else looks at more than single elements; DTensors give these what they look at.
OPTIMIZERS_AT_WHOLES = frozenset({"AdafactorBigVision", "Lamb", "Lars", "Muon"})


def needs_of_optimizer(optimizer: Any) -> tuple[str | None, str]:
    """Return which of `shardcore_loop` has to step an optimizer of timm, and the option that needs it."""
    name, groups = type(optimizer).__name__, optimizer.param_groups
    # An update is taken where most of a whole tensor agrees with its gradient.
    if name in _UNABLE or any(group.get("caution") for group in groups):
        return _WHOLE, ""
    if name == "Muon" and any(group.get("algo") == "adamuon" for group in groups):
        return _WHOLE, "(algo='adamuon')"
    return None, ""
