"""The ModernBERT family of transformers, for shardcore."""
