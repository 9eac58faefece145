"""What the core asks about transformers; see `shardcore.clients`."""

from shardcore_transformers.holders import CHANGES
from shardcore_transformers.loading import from_pretrained

__all__ = ["CHANGES", "from_pretrained"]
