"""The conformance kit on a pack that is right, in plain torch."""

from __future__ import annotations

import pytest
from kit_net import CASE
from local_net import CASE as LOCAL

from shardcore_testing import PolicyConformance


@pytest.mark.nightly
class TestNet(PolicyConformance):
    cases = (CASE, LOCAL)
