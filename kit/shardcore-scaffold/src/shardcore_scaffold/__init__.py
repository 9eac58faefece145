"""New packs: what a model class computes, the policy that follows from it, and the files of a distribution."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardcore._lazy import on_first_use

if TYPE_CHECKING:
    from shardcore_scaffold.cases import Example
    from shardcore_scaffold.draft import Draft
    from shardcore_scaffold.files import write_pack

__all__ = ["Draft", "Example", "write_pack"]

if not TYPE_CHECKING:
    __getattr__ = on_first_use(
        __name__,
        {
            "shardcore_scaffold.cases": ("Example",),
            "shardcore_scaffold.draft": ("Draft",),
            "shardcore_scaffold.files": ("write_pack",),
        },
    )
