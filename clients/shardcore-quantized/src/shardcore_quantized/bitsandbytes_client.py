"""What the core asks about bitsandbytes (see `shardcore.clients`)."""

from __future__ import annotations

from typing import Any

import torch
from bitsandbytes.nn.modules import Linear4bit, Linear8bitLt, LinearFP4, LinearNF4
from torch import nn

from shardcore.errors import NotSupportedError
from shardcore_quantized.packed import PackedWeight
from shardcore_quantized.unpacking import Unpacking, dtype_of
from shardcore_quantized.weight_4bit import Weight4Bit
from shardcore_quantized.weight_8bit import Weight8Bit

__all__ = ["unpacking"]

# What such a linear has beside what ``torch.nn.Linear`` has.
_OF_BITSANDBYTES = (
    "quant_state",
    "compute_dtype",
    "compute_type_is_set",
    "quant_storage",
    "support_avx512bf16_for_cpu",
    "state",
    "index",
)
_KINDS = (Linear4bit, LinearFP4, LinearNF4)


def unpacking(model: nn.Module) -> Unpacking | None:
    """Return the phase that makes the quantized linears of ``model`` ordinary ones, or None if it has none.

    Raises:
        NotSupportedError: it has something of bitsandbytes that cannot be cut, or is not quantized yet.
    """
    found: dict[str, tuple[nn.Module, PackedWeight]] = {}
    for path, module in model.named_modules():
        if type(module) in _KINDS:
            found[path] = (module, _weight(path, module))
        elif type(module) is Linear8bitLt and module.weight.dtype == torch.int8:
            found[path] = (module, Weight8Bit.of(module, dtype_of(model)))
        elif type(module).__module__.partition(".")[0] == "bitsandbytes":
            raise NotSupportedError(
                f"{path} is a {type(module).__module__}.{type(module).__qualname__} which cannot be divided. Quantized "
                "linears can, of BitsAndBytesConfig(load_in_4bit=True) or of load_in_8bit=True"
            )
    return Unpacking(model, found, _OF_BITSANDBYTES) if found else None


def _weight(path: str, module: Any) -> Weight4Bit:
    if module.weight.is_meta:
        return Weight4Bit.to_come(module.weight, module.compute_dtype)
    if getattr(module.weight, "quant_state", None) is None:
        raise NotSupportedError(
            f"{path} is a {type(module).__name__} that is not quantized yet, which it is when it comes to its device: "
            "call model.to(device) before shard()"
        )
    module.state_dict()  # brings what a CPU has packed for its kernels into the usual form
    return Weight4Bit.of(module.weight, module.compute_dtype)
