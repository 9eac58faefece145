"""Heads, logits that stay split over the vocabulary, and losses of them."""
