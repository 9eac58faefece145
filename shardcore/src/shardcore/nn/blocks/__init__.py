"""Blocks that are compiled or recomputed, and fused norms, on one rank as on many."""
