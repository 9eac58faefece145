"""Tokens that are divided over the ranks of ``cp`` from the first block to the last."""
