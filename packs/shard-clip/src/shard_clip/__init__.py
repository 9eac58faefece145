"""CLIP and SigLIP of transformers, for shardcore."""
