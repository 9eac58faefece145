"""Full tensors of sharded models, one after the other: rows in runs, shared heads, ties, experts, replicas."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from torch import nn

import shardcore

SMALL = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
MODELS = {
    "LlamaForCausalLM": SMALL | {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "GPT2LMHeadModel": {"vocab_size": 30, "n_embd": 16, "n_layer": 1, "n_head": 4},
    "MixtralForCausalLM": SMALL | {"num_key_value_heads": 2, "num_local_experts": 4},
}


def _build(name):
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    return cls(cls.config_class(**MODELS[name]))


def every_tensor(fields, names):
    for name in names:
        reference = _build(name)
        wanted = {n: p for n, p in reference.state_dict(keep_vars=True).items() if isinstance(p, torch.Tensor)}
        sharded = shardcore.shard(copy.deepcopy(reference), **fields)
        outer = nn.ModuleDict({"policy": sharded})
        found = dict(shardcore.full_tensors(outer))
        assert [f"policy.{n}" for n, p in wanted.items()][:1] == list(found)[:1]
        assert len(found) == len({id(p) for p in wanted.values()})
        for n, tensor in found.items():
            assert type(tensor) is torch.Tensor
            assert torch.equal(tensor, wanted[n.removeprefix("policy.")]), (name, n)


@pytest.mark.parametrize(
    ("fields", "names"),
    [({"tp": 2}, tuple(MODELS)), ({"tp": 1, "dp": 2}, tuple(MODELS)), ({"ep": 2}, ("MixtralForCausalLM",))],
    ids=["tp", "dp", "ep"],
)
def test_every_tensor_is_whole(pool, fields, names):
    pool.run(every_tensor, fields, names, world=2)


def in_a_pipeline():
    config = transformers.LlamaConfig(**SMALL | {"num_hidden_layers": 2})
    sharded = shardcore.shard(transformers.LlamaForCausalLM(config), pp=2)
    with pytest.raises(shardcore.NotSupportedError, match="2 pipeline stages: each rank has other blocks"):
        shardcore.full_tensors(sharded)


def test_a_pipeline_has_other_blocks_on_each_rank(pool):
    pool.run(in_a_pipeline, world=2)


def test_unsharded_tensors_are_their_own():
    model = nn.Linear(2, 3)
    assert [(name, tensor.data_ptr()) for name, tensor in shardcore.full_tensors(model)] == [
        (name, parameter.data_ptr()) for name, parameter in model.named_parameters()
    ]
    with torch.device("meta"), pytest.raises(shardcore.ConfigError, match="weight is on the meta device"):
        shardcore.full_tensors(nn.Linear(2, 3))
