"""BLIP-2 of transformers, for shardcore."""
