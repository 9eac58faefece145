"""The DeBERTa family of transformers, for shardcore."""
