"""What is asked of a sharded model that hangs; nothing here is on unless somebody switches it on.

May import the core; nothing imports this.
"""

from __future__ import annotations

from shardcore_debug.lone_ranks import watch

__all__ = ["watch"]
