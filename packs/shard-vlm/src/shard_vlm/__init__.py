"""Models of images and text of transformers, for shardcore."""
