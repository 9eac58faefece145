"""Tensors as their bytes: backends, files and checksums differ in the dtypes that they take."""

from __future__ import annotations

import torch
from torch import Tensor


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor of any shape as (bytes,), a view of the same memory.

    A tensor of one number is contiguous whatever its strides are, and torch views it as bytes with a stride of 1 only.
    """
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
