"""What the kit cannot ask of SAM: dropout of attention weights, whose rows and heads are one dim."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist

from shard_sam.cases import build, inputs
from shardcore_testing import hidden_loss, no_float32_islands
from shardcore_testing.observing import Draws, Replay
from shardcore_testing.pack import shard_by
from shardcore_testing.parity import assert_close, assert_same_gradients

PLUGIN = "shard_sam.plugin"


def test_each_rank_drops_weights_of_its_own_heads(pool):
    pool.run(_drops, world=2)


@no_float32_islands()
def _drops() -> None:
    # One image and no windows: the dim of rows and heads is one of heads, and the parts of the ranks follow each other.
    reference = build("SamVisionModel", dropout=0.3, global_attn_indexes=[0, 1], attn_implementation="eager").train()
    torch.manual_seed(dist.get_rank())
    sharded = shard_by(PLUGIN, copy.deepcopy(reference))
    batch = {"pixel_values": inputs(reference, 0)["pixel_values"][:1]}
    with Draws() as draws:
        got = sharded(**batch)
    drawn = [draws.drawn] * dist.get_world_size()
    dist.all_gather_object(drawn, draws.drawn)
    with Replay(list(zip(*drawn, strict=True))) as replay:
        wanted = reference(**batch)
    assert replay.used == len(draws.drawn) == 2
    assert not replay.problems
    assert_close(wanted.last_hidden_state, got.last_hidden_state, "last_hidden_state")
    for out in (wanted, got):
        hidden_loss(out).backward()
    assert_same_gradients(reference, sharded)
