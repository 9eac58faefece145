"""Encoders of transformers that are built like BERT, for shardcore."""
