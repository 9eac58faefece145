"""Criteria that end a generation, where the ranks would not agree."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import MaxTimeCriteria, StoppingCriteria

from shardcore.mesh.context import ShardContext, context_of


class _AgreedTime(StoppingCriteria):  # type: ignore[misc]  # untyped in transformers
    """``max_time`` by the clock of the first tensor-parallel rank: one that stopped alone would leave the others."""

    def __init__(self, own: MaxTimeCriteria, context: ShardContext) -> None:
        self._own = own
        self._context = context

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Return which sequences end, (B,), as the first rank says."""
        done: Tensor = self._own(input_ids, scores, **kwargs).to(torch.uint8)
        dist.broadcast(done, group_src=0, group=self._context.group)
        return done.bool()


def with_agreed_criteria(native: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``native``, a ``_get_stopping_criteria``, with criteria that end on all tensor-parallel ranks at once."""

    @functools.wraps(native)
    def criteria(self: Any, *args: Any, **kwargs: Any) -> Any:
        found, context = native(self, *args, **kwargs), context_of(self)
        if context is not None and context.size > 1:
            for place, each in enumerate(found):
                if isinstance(each, MaxTimeCriteria):
                    found[place] = _AgreedTime(each, context)
        return found

    return criteria
