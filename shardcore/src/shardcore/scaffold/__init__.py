"""A complete pack for a model class that none serves yet: its rows guessed from the module tree, every guess marked."""

from __future__ import annotations

from shardcore.scaffold.files import write_pack
from shardcore.scaffold.guess import Draft, guess

__all__ = ["Draft", "guess", "write_pack"]
