"""Linears and embeddings whose weights are split."""
