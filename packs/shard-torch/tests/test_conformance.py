"""What every pack is held to; the cases are in `shard_torch.cases`."""

from __future__ import annotations

import pytest

from shardcore_testing import PolicyConformance

# In evaluation torch's own encoder makes nested tensors.
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")


class TestTorch(PolicyConformance):
    plugin = "shard_torch.plugin"
