"""The Phi family of transformers, for shardcore."""
