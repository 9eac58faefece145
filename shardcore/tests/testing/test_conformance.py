"""The conformance kit on a pack that is right, in plain torch."""

from __future__ import annotations

from kit_net import CASE
from local_net import CASE as LOCAL

from shardcore.testing import PolicyConformance


class TestNet(PolicyConformance):
    cases = (CASE, LOCAL)
