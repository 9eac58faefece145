"""BEiT and Data2Vec's vision of transformers, for shardcore."""
