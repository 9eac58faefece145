"""The Falcon family of transformers, for shardcore."""
