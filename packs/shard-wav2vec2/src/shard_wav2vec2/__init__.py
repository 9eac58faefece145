"""The Wav2Vec2 family of transformers, for shardcore."""
