"""Models of transformers: loaded, saved, exported and generated from as they are, sharded.

Policies of packs derive from `PretrainedPolicy`, or from `BaseModelPolicy` where one serves a base model and all heads.
Nothing here is needed for models of other libraries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardcore._lazy import on_first_use

if TYPE_CHECKING:
    from shardcore_transformers._context import divides, sdpa
    from shardcore_transformers.pretrained import BaseModelPolicy, PretrainedPolicy, prepared_by_shardcore
    from shardcore_transformers.remote import remote_class

__all__ = ["BaseModelPolicy", "PretrainedPolicy", "divides", "prepared_by_shardcore", "remote_class", "sdpa"]

if not TYPE_CHECKING:
    __getattr__ = on_first_use(
        __name__,
        {
            "shardcore_transformers._context": ("divides", "sdpa"),
            "shardcore_transformers.pretrained": ("BaseModelPolicy", "PretrainedPolicy", "prepared_by_shardcore"),
            "shardcore_transformers.remote": ("remote_class",),
        },
    )
