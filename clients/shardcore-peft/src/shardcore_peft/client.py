"""What the core asks about PEFT (see `shardcore.clients`), and what the client for transformers does."""

from __future__ import annotations

import functools
from typing import Any

from shardcore.nn.behaviour import add_behaviour
from shardcore.nn.process import Change
from shardcore_peft._models import ShardedPeft, adding, load_into, refuse_unplaced
from shardcore_peft._saving import save_adapters
from shardcore_peft.attaching import attached_to
from shardcore_transformers.holders import let_save

__all__ = ["CHANGES", "adding", "attached_to", "load_into", "refuse_unplaced"]


def _save_adapters(model: Any, *rest: Any, **kwargs: Any) -> None:
    own = type(model)
    add_behaviour(model, ShardedPeft)  # which knows the name of what FSDP2 has wrapped
    try:
        save_adapters(model, *rest, **kwargs)
    finally:
        model.__class__ = own


CHANGES: tuple[Change, ...] = (functools.partial(let_save, "peft.peft_model", "PeftModel", _save_adapters),)
