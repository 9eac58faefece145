"""Activations that are split along the sequence between blocks."""
