"""Norms over other groups of features than the configuration counts, as those before transformers 5.23 were."""

import copy

from shard_hybrids.cases import cases
from shardcore_testing.islands import no_float32_islands
from shardcore_testing.parity import assert_same_gradients
from shardcore_testing.subject import Subject


def trains():
    (case,) = (case for case in cases() if case.name == "bamba_tied_shared_kv")
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


def test_a_norm_over_all_features_beside_groups(pool):
    pool.run(trains)
