"""The same plan as the policy of the pack, from a mapping of paths to words."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import transformers
from llama_cases import batch, build, compare_forward, shard

import shardcore
from shard_llama.policy import LlamaPolicy
from shardcore.clients import policy_base
from shardcore.compile import compile_plan, policy_of
from shardcore.errors import AgreementError
from shardcore.policy import Stages
from shardcore.styles import outputs, sequence
from shardcore_testing.observing import Collectives
from shardcore_testing.parity import assert_same_gradients

STAGES = Stages(first="embed_tokens", blocks="layers", last="norm", everywhere="rotary_emb")
ATTENTION = {
    **{f"model.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
    "model.layers.*.self_attn.o_proj": "rowwise",
}
LLAMA = {
    "model.embed_tokens": "embedding_rowwise",
    **ATTENTION,
    "model.layers.*.mlp": "pairwise",
    "lm_head": "colwise_gather_output",
}
#: What no word says: what the model returns besides, and where it can be cut.
BESIDES = {
    "model": [sequence(scatter="layers[0]", gather="norm"), outputs(attentions="heads", hidden_states="sequence")],
    "": STAGES.under("model", then="lm_head"),
}


def _said(model, given, **fields):
    plan = compile_plan(given, model, shardcore.ShardConfig(**fields))
    return str(plan).partition("\n")[2]


@pytest.mark.parametrize(
    "fields",
    [
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 4},
        {"tensor_parallel_size": 2, "enable_sequence_parallelism": True},
        {"tensor_parallel_size": 2, "parallel_output": True},
    ],
    ids=str,
)
def test_the_same_plan(fields):
    model = build()
    written = policy_of({**LLAMA, **BESIDES}, policy_base(model))
    assert _said(model, written, **fields) == _said(model, LlamaPolicy, **fields)


@pytest.mark.skipif(transformers.__version__.startswith("4."), reason="its plans name layers without their model")
def test_the_plan_of_transformers():
    """It is what ``model.tp_plan`` says, where transformers says the embedding too."""
    model = build()
    mlp = {f"model.layers.*.mlp.{name}_proj": "colwise" for name in ("gate", "up")}
    named = {**LLAMA, **mlp, "model.layers.*.mlp.down_proj": "rowwise"}
    del named["model.layers.*.mlp"]
    assert {**named, **model.tp_plan} == named
    assert _said(model, named, tensor_parallel_size=2) == _said(model, LLAMA, tensor_parallel_size=2)


def trains():
    reference = build()
    models = [shard(copy.deepcopy(reference)), shardcore.shard(copy.deepcopy(reference), tp=2, policy=LLAMA)]
    sent = []
    for sharded in models:
        twin = copy.deepcopy(reference)
        with Collectives() as found:
            compare_forward(twin, sharded, batch(reference))
        assert_same_gradients(twin, sharded)
        sent.append(found.counts)
    assert sent[0] == sent[1]
    ids = batch(reference)["input_ids"][:1, :5]
    with torch.no_grad():
        wanted = reference.generate(ids, max_new_tokens=3, do_sample=False)
        assert torch.equal(wanted, models[1].generate(ids, max_new_tokens=3, do_sample=False))


def test_all_gradients_with_as_few_collectives(pool):
    pool.run(trains, world=2)


def differ():
    given = dict(LLAMA)
    if dist.get_rank() == 1:
        given["model.layers.*.mlp"] = "replicate"
    with pytest.raises(AgreementError, match="mlp"):
        shardcore.shard(build(), tp=2, policy=given)


def test_ranks_that_are_given_others(pool):
    pool.run(differ, world=2)
