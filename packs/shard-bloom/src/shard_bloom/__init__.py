"""The BLOOM family of transformers, for shardcore."""
