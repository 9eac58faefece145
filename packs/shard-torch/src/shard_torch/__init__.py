"""The transformers of torch.nn, for shardcore."""
