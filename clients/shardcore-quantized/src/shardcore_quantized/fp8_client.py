"""What the client of transformers asks about weights of FP8 checkpoints."""

from __future__ import annotations

from torch import nn
from transformers.integrations.finegrained_fp8 import FP8Linear

from shardcore.errors import NotSupportedError
from shardcore_quantized.unpacking import Unpacking, dtype_of
from shardcore_quantized.weight_fp8 import WeightFP8

__all__ = ["unpacking"]

# What ``FP8Linear`` has beside what ``torch.nn.Linear`` has.
_OF_FP8 = ("has_bias", "block_size", "activation_scheme")


def unpacking(model: nn.Module) -> Unpacking | None:
    """Return the phase that makes the linears in FP8 of ``model`` ordinary ones, or None if it has none.

    Raises:
        NotSupportedError: it has something in FP8 that cannot be cut.
    """
    dtype = dtype_of(model)
    found = {}
    for path, module in model.named_modules():
        if type(module) is FP8Linear:
            found[path] = (module, WeightFP8.of(path, module, dtype))
        elif any(cls.__module__ == FP8Linear.__module__ for cls in type(module).__mro__):
            raise NotSupportedError(
                f"{path} is a {type(module).__name__}, which cannot be divided; FP8Linear can. Load the model with "
                "FineGrainedFP8Config(dequantize=True), which makes it a plain one"
            )
    return Unpacking(model, found, _OF_FP8) if found else None
