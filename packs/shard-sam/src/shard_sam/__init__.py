"""SAM of transformers, for shardcore."""
