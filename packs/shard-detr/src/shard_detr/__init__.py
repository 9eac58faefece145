"""Detectors of transformers that are built like DETR, for shardcore."""
