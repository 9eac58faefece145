"""The T5 families of transformers, for shardcore."""
