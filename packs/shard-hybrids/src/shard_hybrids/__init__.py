"""Decoders of transformers that mix attention with recurrent or convolutional mixers, for shardcore."""
