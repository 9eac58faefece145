"""What is seen in MiniMax M3 is chosen by a rank for its KV heads, which several ranks may share."""

import copy

import pytest

from shard_decoders.cases import cases
from shardcore.comm.strided import torch_lacks
from shardcore_testing.islands import no_float32_islands
from shardcore_testing.parity import assert_same_gradients
from shardcore_testing.subject import Subject


def trains(tp):
    (case,) = (case for case in cases() if case.name == "minimaxm3vl_tied_shared_kv")
    subject = Subject(case=case, tp=tp)
    whole = subject.build().requires_grad_(True)  # what chooses is used without its gradients, frozen or not
    sharded = subject.shard(copy.deepcopy(whole))
    indexer = sharded.get_submodule("model.layers.1.self_attn.indexer")
    assert (indexer.num_heads, indexer.config.num_attention_heads) == (max(1, 2 // tp), 4 // tp)
    assert sharded.config.num_attention_heads == 4
    inputs = subject.inputs(whole)
    with no_float32_islands():
        for model in (whole, sharded):
            subject.loss(model(**inputs)).backward()
    assert_same_gradients(whole, sharded)
    assert all(p.grad is None for p in indexer.parameters())


@pytest.mark.skipif(torch_lacks() is not None, reason="fused experts need torch 2.12")
@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.four)])
def test_ranks_choose_for_their_heads(pool, tp):
    pool.run(trains, tp, world=tp)
