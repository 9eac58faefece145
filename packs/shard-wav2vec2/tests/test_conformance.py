"""What every pack is held to; the cases are in `shard_wav2vec2.cases`."""

from __future__ import annotations

import pytest

from shardcore_testing import PolicyConformance


class TestWav2vec2(PolicyConformance):
    plugin = "shard_wav2vec2.plugin"

    def test_refusals(self, judge, request):
        self._closes(judge, request, "refusals")

    def test_closed(self, judge, request):
        self._closes(judge, request, "closed")

    def _closes(self, judge, request, check):
        # That a capability is closed is shown by trying it.
        if "wavlm" in request.node.callspec.id:
            pytest.skip("closed for WavLM: transformers' own backward with reentrant checkpoints does not end")
        judge(check)
