"""Linears as bitsandbytes quantizes them."""

from __future__ import annotations

from typing import Any

import bitsandbytes
import torch
from torch import Tensor


def packed(weight: Tensor, kind: str = "nf4") -> Any:
    """Return a linear (in float32, computing in the dtype of its input) as bitsandbytes quantizes it."""
    out, size = weight.shape
    linear = bitsandbytes.nn.Linear4bit(size, out, bias=False, quant_type=kind)
    single = torch.empty(out, size).copy_(weight.detach())  # also where float64 stays float64
    linear.weight = bitsandbytes.nn.Params4bit(single, quant_type=kind).to("cpu")
    return linear
