"""What lightning attention remembers in a generation: states of a rank's heads, in a cache of MiniMax's own."""

import pytest
import torch

from shard_hybrids.cases import cases
from shardcore.comm.strided import torch_lacks
from shardcore_testing.islands import no_float32_islands
from shardcore_testing.subject import Subject


def generates(tp):
    (case,) = (case for case in cases() if case.name == "minimax_tied_shared_kv")
    subject = Subject(case=case, tp=tp)
    with no_float32_islands(), torch.no_grad():
        whole, sharded = (model.eval() for model in subject.twins())
        prompt = subject.prompt(whole)
        for cached in (True, False):
            way = {"use_cache": cached, "max_new_tokens": 5, "do_sample": False}
            wanted, got = (model.generate(**prompt, **way) for model in (whole, sharded))
            assert torch.equal(wanted, got)
        for model, heads in ((whole, 4), (sharded, 4 // tp)):
            out = model(**prompt, use_cache=True)
            (states,) = (s for s in (out.get("cache") or out.past_key_values).linear_cache if len(s))
            assert states.shape[1] == heads
    attention = sharded.get_submodule("model.layers.1.self_attn")
    assert len(attention.slope_rate) == len(attention.state_dict()["slope_rate"]) == 4


@pytest.mark.skipif(torch_lacks() is not None, reason="fused experts need torch 2.12")
@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.four)])
def test_states_are_those_of_a_rank(pool, tp):
    pool.run(generates, tp, world=tp)
