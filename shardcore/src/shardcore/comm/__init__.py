"""Collectives as forward/backward pairs. May import `shardcore.mesh` and nothing above it."""

from __future__ import annotations

from shardcore.comm.collectives import copy_to_tp, gather_from_tp, reduce_from_tp, split_to_tp
from shardcore.comm.reads import local_tensor, read_local, with_spec

__all__ = [
    "copy_to_tp",
    "gather_from_tp",
    "local_tensor",
    "read_local",
    "reduce_from_tp",
    "split_to_tp",
    "with_spec",
]
