"""GPT-Neo, GPT-J, GPT-NeoX and GPT-NeoX-Japanese of transformers, for shardcore."""
