"""Models that bitsandbytes has quantized to 4 bits, sharded: `shardcore.shard` finds this by itself.

May import the core; nothing imports this.
"""

from __future__ import annotations

from shardcore_bitsandbytes.weights import Weight4Bit

__all__ = ["Weight4Bit"]
