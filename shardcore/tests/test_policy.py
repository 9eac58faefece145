from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from shardcore.policy import HeadCounts, Heads, Policy, Stages


@pytest.mark.parametrize(
    ("query", "kv", "ranks", "local_query", "local_kv", "kv_replication"),
    [(8, 8, 2, 4, 4, 1), (8, 2, 2, 4, 1, 1), (8, 2, 4, 2, 1, 2), (8, 1, 4, 2, 1, 4), (8, 4, 1, 8, 4, 1)],
)
def test_head_counts(query, kv, ranks, local_query, local_kv, kv_replication):
    counts = HeadCounts(query=query, kv=kv, ranks=ranks)
    assert (counts.local_query, counts.local_kv, counts.kv_replication) == (local_query, local_kv, kv_replication)


def _model(**config):
    model = nn.Module()
    model.config = SimpleNamespace(**config)
    return model


def test_heads():
    assert Heads("h").counts(_model(h=4), 2) == HeadCounts(query=4, kv=4, ranks=2)
    assert Heads("h", kv="k").counts(_model(h=4, k=2), 2) == HeadCounts(query=4, kv=2, ranks=2)
    assert Heads("h", kv="k").counts(_model(h=4, k=None), 2) == HeadCounts(query=4, kv=4, ranks=2)
    assert Heads("h").counts(nn.Module(), 2) is None
    assert Heads("h", kv="k").problem(_model(h=4, k=2), 4) is None
    what, todo = Heads("h").problem(_model(h=12), 5)
    assert "12 query heads (h) cannot be split over 5 ranks" in what
    assert todo == "use a tensor_parallel_size of 1, 2, 3, 4, 6, 12"
    what, todo = Heads("h", kv="k").problem(_model(h=12, k=3), 4)
    assert "3 key/value heads (k) cannot be shared by 4 ranks" in what
    assert todo == "use a tensor_parallel_size that divides 3 or is a multiple of it"


def test_stages_under_a_head():
    stages = Stages(first="embed", blocks="layers", last=("norm",), everywhere=("rotary", "mask"))
    assert stages.under("model", then=("drop", "head")) == Stages(
        first=("model.embed",),
        blocks=("model.layers",),
        last=("model.norm", "drop", "head"),
        everywhere=("model.rotary", "model.mask"),
    )


def test_a_policy_by_default_changes_nothing():
    class Minimal(Policy):
        def module_policy(self):
            return {}

    policy = Minimal()
    model = nn.Linear(2, 2)
    policy.set_model(model)
    assert policy.model is model
    assert (policy.preprocess(), policy.postprocess(), policy.new_model_class()) == (None, None, None)
    with pytest.raises(TypeError, match="abstract"):
        Policy()
