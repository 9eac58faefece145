"""GPT-2 of transformers for shardcore: policies, found through the entry point ``shardcore.packs``."""
