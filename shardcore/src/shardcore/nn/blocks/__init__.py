"""What is done to a block as a whole, or to a norm, on one rank as on many: compiled, recomputed, fused."""
