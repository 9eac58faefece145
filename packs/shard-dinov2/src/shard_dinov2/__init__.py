"""DINOv2 of transformers, with registers and without, and DINOv3, for shardcore."""
