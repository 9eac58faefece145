"""The DeBERTa-v2 family of transformers, for shardcore."""
