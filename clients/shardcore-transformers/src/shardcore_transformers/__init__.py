"""Models of transformers: loaded, saved, exported and generated from as they are, sharded.

`PretrainedPolicy` is what the policies of packs derive from. Nothing here is needed for models of other libraries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardcore._lazy import on_first_use

if TYPE_CHECKING:
    from shardcore_transformers.pretrained import PretrainedPolicy, prepared_by_shardcore

__all__ = ["PretrainedPolicy", "prepared_by_shardcore"]

if not TYPE_CHECKING:
    __getattr__ = on_first_use(
        __name__,
        {
            "shardcore_transformers.pretrained": ("PretrainedPolicy", "prepared_by_shardcore"),
        },
    )
