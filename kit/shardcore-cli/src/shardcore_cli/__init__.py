"""The ``shardcore`` command. May import everything; each command imports what it needs when it runs."""

from __future__ import annotations

from shardcore_cli.app import main

__all__ = ["main"]
