"""The OPT family of transformers, for shardcore."""
