"""New packs: what a model class computes, the policy that follows from it, and the files of a distribution."""

from __future__ import annotations

from shardcore.scaffold.draft import Draft
from shardcore.scaffold.files import Example, write_pack

__all__ = ["Draft", "Example", "write_pack"]
