"""The ALBERT family of transformers, for shardcore."""
