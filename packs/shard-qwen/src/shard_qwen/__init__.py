"""The Qwen family of transformers, for shardcore."""
