"""Models that bitsandbytes or torchao has quantized, or of FP8 checkpoints: `shardcore.shard` finds this by itself.

May import the core; nothing imports this. One module for each library knows it, and neither is imported before a model
has something of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardcore._lazy import on_first_use

if TYPE_CHECKING:
    from shardcore_quantized.weight_4bit import Weight4Bit
    from shardcore_quantized.weight_8bit import Weight8Bit
    from shardcore_quantized.weight_fp8 import WeightFP8
    from shardcore_quantized.weight_torchao import WeightTorchao

__all__ = ["Weight4Bit", "Weight8Bit", "WeightFP8", "WeightTorchao"]

if not TYPE_CHECKING:
    __getattr__ = on_first_use(
        __name__,
        {
            "shardcore_quantized.weight_4bit": ("Weight4Bit",),
            "shardcore_quantized.weight_8bit": ("Weight8Bit",),
            "shardcore_quantized.weight_fp8": ("WeightFP8",),
            "shardcore_quantized.weight_torchao": ("WeightTorchao",),
        },
    )
