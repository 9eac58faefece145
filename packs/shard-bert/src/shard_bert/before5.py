"""BERT on transformers 4: attention counts heads and may know relative positions."""

from __future__ import annotations

import transformers
from packaging.version import Version
from torch import nn

from shardcore.policy import ModulePolicy
from shardcore.styles import attribute, partial, per_rank

IS_OLD = Version(transformers.__version__) < Version("5")


def rules_of(encoder: nn.Module) -> ModulePolicy:
    """Return what the attentions of an encoder need in addition."""
    attention = [
        attribute("num_attention_heads", per_rank),
        attribute("all_head_size", per_rank),
        partial("distance_embedding", optional=True),
    ]
    names = ("attention.self", "crossattention.self")
    return {type(module): attention for path, module in encoder.named_modules() if path.endswith(names)}
