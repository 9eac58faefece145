"""A complete pack for a model class that none serves yet: its rules are guessed from the module tree and marked."""

from __future__ import annotations

from shardcore.scaffold.files import write_pack
from shardcore.scaffold.guess import Draft, guess

__all__ = ["Draft", "guess", "write_pack"]
