"""Channels, and collectives on them as forward/backward pairs. Imports nothing above it, `shardcore.mesh` included."""

from __future__ import annotations

from shardcore.comm.collectives import Channel, copy_to_tp, gather_from_tp, reduce_from_tp, split_to_tp
from shardcore.comm.dtensor_params import local_tensor, read_local, with_spec

__all__ = [
    "Channel",
    "copy_to_tp",
    "gather_from_tp",
    "local_tensor",
    "read_local",
    "reduce_from_tp",
    "split_to_tp",
    "with_spec",
]
