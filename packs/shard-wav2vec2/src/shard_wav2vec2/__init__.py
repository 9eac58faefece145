"""Wav2Vec2 of transformers, and what is built like it, for shardcore."""
