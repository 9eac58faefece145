"""GPT-Neo and GPT-J of transformers, for shardcore."""
