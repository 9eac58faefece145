"""What every pack is held to; the cases are in `shard_clip.cases`."""

from __future__ import annotations

import pytest

from shardcore.testing import PolicyConformance


class TestClip(PolicyConformance):
    plugin = "shard_clip.plugin"

    def test_data_parallel(self, judge, request):
        """As in the kit, but for CLIPModel, of which `test_clip` says what holds."""
        _with_dims(request)
        judge("data parallel")

    def test_resume(self, judge, request):
        """As in the kit, but for CLIPModel, of which `test_clip` says what holds."""
        _with_dims(request)
        judge("resume")


def _with_dims(request) -> None:
    if request.node.callspec.id.startswith("contrastive-"):
        pytest.skip("FSDP2 shards no parameter without dims, as the logit_scale of CLIPModel is")
