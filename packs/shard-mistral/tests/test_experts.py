"""What the kit does not try on experts: the balancing loss, how experts compute, replicas, and files."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from packaging.version import Version
from safetensors.torch import load_file

import shardcore
from shard_mistral.cases import build, inputs
from shardcore._torch import CAN_PIPELINE, CAN_TRACE
from shardcore.errors import NotSupportedError
from shardcore.mesh.context import context_of
from shardcore_testing.parity import assert_close, assert_same_gradients, assert_same_parameters, whole
from shardcore_testing.subject import checkpointing

BEFORE5 = Version(transformers.__version__) < Version("5.0.0")
CAPTURES = importlib.util.find_spec("transformers.utils.output_capturing") is not None
#: The balancing loss counts as much as the other.
BALANCED = {"router_aux_loss_coef": 1.0, "num_key_value_heads": 2}
SEQUENCE = {"enable_sequence_parallelism": True}


def pair(fields, **options):
    reference = build("MixtralForCausalLM", **{**BALANCED, **options}).double()
    return reference, shardcore.shard(copy.deepcopy(reference), **fields)


def balanced(fields, experts, recomputes):
    reference, model = pair(fields, experts=experts)
    if recomputes:
        checkpointing(model, {"use_reentrant": False})
        model.train(), reference.train()
    for step in range(2):
        batch = inputs(reference, step)
        wanted = reference(**batch, output_router_logits=True)
        got = model(**batch, output_router_logits=True)
        for name in ("loss", "aux_loss"):
            assert_close(wanted[name], got[name], name)
        for theirs, ours in zip(wanted.router_logits, got.router_logits, strict=True):
            assert_close(theirs, ours, "router logits")
        wanted.loss.backward()
        got.loss.backward()
    assert_same_gradients(reference, model)


IMPLEMENTATIONS = ("eager",) if BEFORE5 else ("eager", "batched_mm")


@pytest.mark.parametrize("experts", IMPLEMENTATIONS)
@pytest.mark.parametrize("fields", [{}, SEQUENCE, {"parallel_output": True}], ids=["tp", "sequence", "split logits"])
def test_the_balancing_loss_is_exact(pool, fields, experts):
    for world in (2, 4):
        pool.run(balanced, fields, experts, False, world=world)


def test_the_balancing_loss_of_recomputed_blocks(pool):
    for fields in ({}, SEQUENCE):
        pool.run(balanced, fields, "eager", True)


def grouped(dtype, inner):
    reference = build("MixtralForCausalLM", **BALANCED, experts="grouped_mm", hidden_size=64, intermediate_size=inner)
    reference = reference.to(dtype)
    model = shardcore.shard(copy.deepcopy(reference))
    batch = inputs(reference, 0)
    wanted, got = (net(**batch, output_router_logits=True) for net in (reference, model))
    assert_close(wanted.loss, got.loss, "loss", 1e-5 if dtype is torch.float32 else 2e-2)
    for out in (wanted, got):
        out.loss.backward()
    assert_same_gradients(reference, model, 2e-5 if dtype is torch.float32 else 5e-2)


@pytest.mark.skipif(BEFORE5, reason="transformers 5 brought them")
@pytest.mark.parametrize(("dtype", "inner"), [(torch.float32, 48), (torch.float32, 44), (torch.bfloat16, 48)])
def test_grouped_products(pool, dtype, inner):
    """Also where the rows of a slice are no multiple of 16 bytes, as those of all experts are."""
    pool.run(grouped, dtype, inner)


def balanced_in_a_pipeline(count, fields):
    """What each stage has of the scores of routers goes on to the last one; each micro-batch has its own balance."""
    reference = build("MixtralForCausalLM", **BALANCED, num_hidden_layers=4).double()
    model = shardcore.shard(copy.deepcopy(reference), pp=2, num_microbatches=count, **fields)
    ids = torch.randint(3, 97, (4, 12), generator=torch.Generator().manual_seed(3))
    wanted = 0.0
    for part in ids.chunk(count):
        loss = reference(input_ids=part, labels=part, output_router_logits=True).loss / count
        loss.backward()
        wanted += loss.detach()
    assert_close(
        wanted, model.train_step({"input_ids": ids, "labels": ids, "output_router_logits": True}), "loss", 1e-6
    )
    for name, parameter in model.named_parameters():
        assert_close(reference.get_parameter(name).grad, whole(parameter.grad), name)
    assert model.eval_step({"input_ids": ids, "labels": ids}) < wanted - 0.5
    model.config.output_router_logits = True
    assert_close(wanted, model.eval_step({"input_ids": ids, "labels": ids}), "loss without gradients", 1e-6)
    with torch.no_grad():
        there, here = (net(input_ids=ids, output_router_logits=True, use_cache=False) for net in (reference, model))
    assert_close(there.aux_loss, here.aux_loss, "balancing loss")
    for theirs, ours in zip(there.router_logits, here.router_logits, strict=True):
        assert_close(theirs, ours, "router logits")


@pytest.mark.skipif(not CAN_PIPELINE, reason="pipelines need torch 2.13")
@pytest.mark.skipif(not CAPTURES, reason="transformers 5.2 keeps scores where others can see them")
@pytest.mark.parametrize(
    ("count", "fields", "world"),
    [
        (2, {}, 2),
        (4, {"pipeline_schedule": "zbv"}, 2),
        pytest.param(1, {"tp": 2, **SEQUENCE}, 4, marks=pytest.mark.newest),
        pytest.param(2, {"dp": 2}, 4, marks=pytest.mark.newest),
    ],
)
def test_the_balancing_loss_of_a_pipeline(pool, count, fields, world):
    pool.run(balanced_in_a_pipeline, count, fields, world=world)


def refused_in_a_pipeline():
    model = shardcore.shard(build("MixtralForCausalLM", **BALANCED).double(), pp=2, num_microbatches=1)
    batch = inputs(model, 0)
    with pytest.raises(NotSupportedError, match="pipeline_parallel_size=1"):
        model.train_step({**batch, "output_router_logits": True})
    model.train_step(batch)


@pytest.mark.skipif(not CAN_PIPELINE, reason="pipelines need torch 2.13")
@pytest.mark.skipif(CAPTURES, reason="served since transformers 5.2")
def test_the_balancing_loss_of_a_pipeline_is_refused(pool):
    pool.run(refused_in_a_pipeline)


def replicas(fields, shape):
    reference, model = pair(fields)
    part = context_of(model).replica
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-4) for net in (reference, model)]
    for step in range(3):
        ids = torch.randint(1, 97, shape, generator=torch.Generator().manual_seed(step))
        norms = []
        for net, mine in ((reference, ids), (model, ids.chunk(2)[part])):
            net(input_ids=mine, labels=mine).loss.backward()
        without = [{name for name, p in net.named_parameters() if p.grad is None} for net in (reference, model)]
        assert without[0] == without[1]
        assert_same_gradients(reference, model)
        for net, optimizer in zip((reference, model), optimizers, strict=True):
            norms.append(whole(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)).detach())
            optimizer.step()
            optimizer.zero_grad()
        assert_close(*norms, "norm of all gradients")
        assert_same_parameters(reference, model)


@pytest.mark.newest
def test_replicas_average_experts(pool):
    pool.run(replicas, {"tp": 2, "dp": 2}, (4, 7), world=4)


@pytest.mark.parametrize("fields", [{"dp": 2}, {"dp_replicate_size": 2}], ids=str)
def test_replicas_whose_tokens_visit_few_experts(pool, fields):
    """In transformers 4 experts are a list, and those without tokens are not called: no gradient comes by itself."""
    pool.run(replicas, fields, (2, 2))


def same_files(folder, fields):
    reference, model = pair(fields, max_position_embeddings=32)
    ours, theirs = Path(folder, "ours"), Path(folder, "theirs")
    model.save_pretrained(ours, max_shard_size=30_000)
    if dist.get_rank() == 0:
        reference.save_pretrained(theirs, max_shard_size=30_000)
        names = sorted(path.name for path in theirs.iterdir())
        assert sorted(path.name for path in ours.iterdir()) == names
        tensors = {}
        for name in names:
            if name.endswith(".safetensors"):
                mine, wanted = load_file(ours / name), load_file(theirs / name)
                assert mine.keys() == wanted.keys()
                assert all(torch.equal(mine[key], wanted[key]) for key in wanted)
                tensors |= wanted
            else:
                assert (ours / name).read_text() == (theirs / name).read_text(), name
        # In files each expert's matrices are by themselves, whatever they are in the model.
        assert "model.layers.1.block_sparse_moe.experts.4.w3.weight" in tensors
    dist.barrier()
    again = shardcore.from_pretrained(type(reference), str(ours), dtype=torch.float64, **fields)
    assert_same_parameters(reference, again, 0.0)
    for name, parameter in again.named_parameters():
        if ".experts." in name:
            assert parameter.to_local().numel() < parameter.numel() * 2 // 3, name


@pytest.mark.parametrize("fields", [{"tp": 2}, {"tp": 4}, {"tp": 2, "dp": 2}], ids=["tp2", "tp4", "tp2-dp2"])
def test_files_are_those_of_the_unsharded_model(pool, tmp_path, fields):
    pool.run(same_files, str(tmp_path), fields, world=2 if fields == {"tp": 2} else 4)


def one_graph():
    torch._dynamo.reset()
    reference, model = (each.eval() for each in pair({"tp": 2}, experts="batched_mm"))  # dropout would break it
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    batch = inputs(reference, 0)
    for one in (reference, model):
        one(**batch).loss.backward()
    assert_same_gradients(reference, model)


@pytest.mark.skipif(
    BEFORE5 or not CAN_TRACE, reason="experts of transformers 4 loop, and old releases of torch break graphs"
)
@pytest.mark.filterwarnings("default")  # torch warns of its own doings while it traces
def test_a_layer_with_experts_is_one_graph(pool):
    pool.run(one_graph, world=2, timeout=100)
