"""The DeepSeek family of transformers, for shardcore."""
