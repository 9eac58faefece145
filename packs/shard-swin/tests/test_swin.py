"""What the kit does not ask of Swin: images that windows do not fill, and ranks that divide the heads of no stage."""

from __future__ import annotations

import copy

import pytest
import torch

from shard_swin.cases import build, maps_loss
from shardcore.errors import PlanError
from shardcore_testing.pack import shard_by
from shardcore_testing.parity import assert_close, assert_same_gradients

PLUGIN = "shard_swin.plugin"


@pytest.mark.parametrize("name", ["SwinBackbone", "Swinv2Backbone"])
def test_windows_that_are_padded(pool, name):
    pool.run(_padded, name, world=2)


def _padded(name: str) -> None:
    reference = build(name, image_size=10, out_features=["stage1", "stage2"]).train()
    sharded = shard_by(PLUGIN, copy.deepcopy(reference))
    images = torch.randn(2, 3, 10, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    outs = [model(images) for model in (reference, sharded)]
    for wanted, got in zip(*(out.feature_maps for out in outs), strict=True):
        assert_close(wanted, got, "feature_maps")
    for out in outs:
        maps_loss(out).backward()
    assert_same_gradients(reference, sharded)


def test_ranks_that_divide_the_heads_of_no_stage(pool):
    pool.run(_refused, world=3)


def _refused() -> None:
    model = build("Swinv2Model")
    with pytest.raises(PlanError, match=r"4, 8 heads \(num_heads\) none can be split over 3 ranks"):
        shard_by(PLUGIN, model)
