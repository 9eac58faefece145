"""Rooms that know one foreign library each; packs and the command line import them, the rest of the core never does."""
