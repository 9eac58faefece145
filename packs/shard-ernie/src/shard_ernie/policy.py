"""How ERNIE is sharded: as BERT, with embeddings of the task."""

from __future__ import annotations

from typing import ClassVar

from shard_bert.policy import BertPolicy
from shardcore.policy import Heads


class ErniePolicy(BertPolicy):
    """ERNIE, with a head or without; any number of ranks share its heads."""

    checks = (Heads("num_attention_heads", uneven=True),)
    added: ClassVar[tuple[str, ...]] = (*BertPolicy.added, "task_type_embeddings")
