"""The BART family of transformers, for shardcore."""
