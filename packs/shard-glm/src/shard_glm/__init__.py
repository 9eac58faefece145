"""The GLM family of transformers, for shardcore."""
