"""DINOv2 of transformers, with registers and without, for shardcore."""
