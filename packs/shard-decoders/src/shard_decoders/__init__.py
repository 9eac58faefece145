"""Decoders of transformers that are built like Llama, for shardcore."""
