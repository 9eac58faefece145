"""Caches that are filled by a call whose tokens are divided: each rank has its own keys first, and then all.

A cache of transformers takes what an attention gives it, the keys and values of this rank's tokens, and gives them back
as they are while it is empty. When the stack is through, those of all ranks are put into it, so that later calls, which
have a token or two and are not divided, find what they would find on one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from shardcore.errors import NotSupportedError
from shardcore.nn.context.places import Places, Spans, total
from shardcore.nn.context.shard import ContextShard


def filling(cache: Any) -> Callable[[ContextShard], None] | None:
    """Return what completes an empty ``cache``; None for one that holds something, or that keeps it in another way."""
    own = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    if type(own) is not DynamicCache or own.offloading:
        return None
    kinds = {type(layer) for layer in own.layers} | {own.layer_class_to_replicate or DynamicLayer}
    if own.get_seq_length() or not kinds <= {DynamicLayer, DynamicSlidingWindowLayer}:
        return None
    if any(getattr(layer, "record_past", False) for layer in own.layers):  # what it keeps is cropped later
        return None
    return lambda shard: _fill(own, shard)


def _fill(cache: DynamicCache, shard: ContextShard) -> None:
    places = shard.last
    if places is None:  # few tokens, which every rank has all of
        return
    for number, layer in enumerate(cache.layers):
        if not layer.is_initialized:  # it shares the keys of another one
            continue
        sliding = isinstance(layer, DynamicSlidingWindowLayer)
        kept = layer.sliding_window - 1 if sliding else places.length
        ranks = tuple(_last(spans, kept) for spans in places.ranks)
        if layer.keys.size(-2) != total(ranks[shard.rank]):
            raise NotSupportedError(
                f"layer {number} has put {layer.keys.size(-2)} keys into the cache under context parallelism, where "
                f"those of {total(ranks[shard.rank])} tokens were expected: do not give a cache, or shard without "
                "context_parallel_size"
            )
        both = torch.cat([layer.keys, layer.values], -1).transpose(1, 2)
        whole = shard.whole(both, Places(places.length, places.rings, ranks)).transpose(1, 2)[:, :, -kept:]
        layer.keys, layer.values = whole.split([layer.keys.size(-1), layer.values.size(-1)], -1)
        if sliding:
            layer.cumulative_length = places.length


def _last(spans: Spans, count: int) -> Spans:
    """Return the last tokens of a rank."""
    found: list[tuple[int, int]] = []
    for start, stop in reversed(spans):
        if count > 0:
            found.insert(0, (max(start, stop - count), stop))
        count -= stop - start
    return tuple(found)
