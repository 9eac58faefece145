"""Mixtures of experts over several ranks."""
