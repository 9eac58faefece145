"""The Gemma family of transformers, for shardcore."""
