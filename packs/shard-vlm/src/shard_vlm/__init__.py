"""Models of images, sounds and text of transformers, for shardcore."""
