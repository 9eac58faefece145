"""Norms over other groups of features than the configuration counts, as those before transformers 5.23 were."""

import copy

import pytest

from shard_hybrids.cases import cases
from shardcore.comm.strided import torch_lacks
from shardcore_testing.islands import no_float32_islands
from shardcore_testing.parity import assert_same_gradients
from shardcore_testing.subject import Subject

EXPERTS = pytest.mark.skipif(torch_lacks() is not None, reason="fused experts need torch 2.12")


def trains(family):
    (case,) = (case for case in cases() if case.name == f"{family}_tied_shared_kv")
    subject = Subject(case=case, tp=2)
    whole = subject.build()
    assert whole.config.mamba_n_groups == 4
    for module in whole.modules():
        if type(module).__name__.endswith("RMSNormGated"):
            module.group_size = len(module.weight)
    sharded = subject.shard(copy.deepcopy(whole))
    inputs = subject.inputs(whole)
    with no_float32_islands():
        for model in (whole, sharded):
            subject.loss(model(**inputs)).backward()
    assert_same_gradients(whole, sharded)


@pytest.mark.parametrize("family", ["bamba", pytest.param("granitemoehybrid", marks=EXPERTS)])
def test_a_norm_over_all_features_beside_groups(pool, family):
    pool.run(trains, family)
