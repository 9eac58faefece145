"""The meshes on which the kit goes on with a training that was saved."""

from __future__ import annotations

import pytest
from kit_net import CASE

from shardcore_testing.checks_resume import _meshes
from shardcore_testing.subject import Subject


@pytest.mark.parametrize(("ranks", "wanted"), [(2, (1, 2)), (3, (1, 3)), (4, (2, 2)), (9, (3, 3))])
def test_all_ranks_are_used(ranks, wanted):
    found = _meshes(Subject(case=CASE, tp=ranks))
    assert [(f["tp"], f["dp"]) for f in found.values() if f and "dp" in f] == [wanted]
