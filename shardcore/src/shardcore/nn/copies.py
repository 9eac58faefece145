"""Copies of models without their values."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

__all__ = ["meta_copy"]


def meta_copy(model: nn.Module, dtype: torch.dtype | None = None) -> Any:
    """Return a copy of ``model`` on the meta device, with the same ties.

    Args:
        model: the model.
        dtype: of the copy's floating-point parameters; that of the model's if not given.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        to = dtype if parameter.is_floating_point() and dtype is not None else parameter.dtype
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta", to), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.to("meta")
    return copy.deepcopy(model, memo)
