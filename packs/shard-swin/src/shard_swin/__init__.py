"""Swin Transformers v1 and v2 of transformers, for shardcore."""
