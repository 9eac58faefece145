"""BEiT of transformers, for shardcore."""
