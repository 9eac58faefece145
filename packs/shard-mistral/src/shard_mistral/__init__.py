"""Mistral and Mixtral of transformers for shardcore: policies, found through the entry point ``shardcore.packs``."""
