"""The ERNIE family of transformers, for shardcore."""
