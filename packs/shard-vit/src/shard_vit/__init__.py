"""Vision transformers for shardcore: policies for transformers and timm, found through ``shardcore.packs``."""
