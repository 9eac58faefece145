"""Copies of models without their values."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

__all__ = ["meta_copy"]


def meta_copy(model: nn.Module) -> Any:
    """Return a copy of ``model`` on the meta device, with the same ties."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.to("meta")
    return copy.deepcopy(model, memo)
