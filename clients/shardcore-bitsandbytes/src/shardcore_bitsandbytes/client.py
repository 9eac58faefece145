"""What the core asks about bitsandbytes (see `shardcore.clients`)."""

from __future__ import annotations

from shardcore_bitsandbytes.unpacking import unpacking

__all__ = ["unpacking"]
