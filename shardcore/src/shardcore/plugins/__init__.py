"""Discover and resolve: which installed packs there are, and which policy serves a model. Imports no torch."""
