"""Tensor and data parallelism together: FSDP2 on a sharded Llama equals the unsharded model on the whole batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from llama_cases import Batch, adamw, assert_no_empty_part, batch, build, clip_and_step, pair, shard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard

import shardcore
from shardcore.mesh.context import context_of
from shardcore_testing.parity import assert_same_gradients, assert_same_parameters, equal_on_ranks, whole
from shardcore_testing.subject import checkpointing

pytestmark = pytest.mark.newest


def _share(model: Any, seed: int, parts: int, part: int) -> tuple[Batch, Batch]:
    """Return a whole batch and the part of one replica; with as many real tokens in each, so that means agree."""
    everything = batch(model, seed, rows=4, pads=(1, 3, 3, 1) if parts <= 2 else (2,))
    return everything, {name: value.chunk(parts)[part] for name, value in everything.items()}


def _train(reference: Any, model: Any, replicas: int, replica: int, steps: int = 3) -> None:
    optimizers = adamw(reference), adamw(model)
    for step in range(steps):
        for micro in range(2):
            everything, mine = _share(reference, 10 * step + micro, replicas, replica)
            reference(**everything).loss.backward()
            model(**mine).loss.backward()
        assert_same_gradients(reference, model)
        clip_and_step((reference, model), optimizers, 0.05)
        assert_same_parameters(reference, model)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_key_value_heads": 1, "attn_implementation": "eager"},
        {"vocab_size": 97, "tie_word_embeddings": True},
        {"vocab_size": 3, "pad_token_id": None, "bos_token_id": None},
    ],
    ids=["plain", "one-kv-head", "tied-odd-vocabulary", "tiny-vocabulary"],
)
def test_fsdp(pool, options):
    pool.run(_fsdp, options, world=4)


def _fsdp(options: dict) -> None:
    reference, model = pair(tp=2, dp=2, **options)
    if reference.config.vocab_size > 3:  # 3 rows over 4 ranks: FSDP2 copes with what it leaves empty itself
        assert_no_empty_part(model)
    _train(reference, model, 2, context_of(model).replica)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == reference.config.tie_word_embeddings


@pytest.mark.parametrize("kind", [True, False], ids=["reentrant", "non-reentrant"])
def test_fsdp_with_checkpointing(pool, kind):
    pool.run(_fsdp_checkpointing, kind, world=4)


def _fsdp_checkpointing(reentrant: bool) -> None:
    reference = build(num_key_value_heads=2)
    model = copy.deepcopy(reference)
    checkpointing(model, {"use_reentrant": reentrant})
    shard(model, tp=2, dp=2)
    _train(reference, model, 2, context_of(model).replica, steps=2)


def test_replicas(pool):
    pool.run(_replicas, world=4)


def _replicas() -> None:
    reference, model = build(num_key_value_heads=1), build(num_key_value_heads=1)
    shard(model, tp=2, dp_replicate_size=2)
    assert model.model.norm.weight.placements in ((Replicate(), Replicate()), (Replicate(),))
    _train(reference, model, 2, context_of(model).replica)


def test_no_tensor_parallelism(pool):
    pool.run(_only_data, {"tp": 1, "dp": 2}, world=2)


def test_hybrid_sharding(pool):
    pool.run(_only_data, {"tp": 1, "dp_replicate_size": 2, "dp_shard_size": 2}, world=4)


def _only_data(sizes: dict) -> None:
    reference = build(num_key_value_heads=2)
    model = shard(copy.deepcopy(reference), **sizes)
    _train(reference, model, dist.get_world_size(), context_of(model).replica, steps=2)


# FSDP2 warns of every linear that it wraps alone, unsharded ones too.
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view:UserWarning")
def test_a_users_own_wrapping(pool):
    pool.run(_own, world=4)


def _own() -> None:
    # Per layer; per submodule, where the linears' weights are gathered after the region has opened; not resharding.
    for way in ("layers", "submodules", "linears", "no-reshard"):
        reference, model = build(num_key_value_heads=1), build(num_key_value_heads=1)
        shard(model, tp=2, dp=2, wrap=False)
        mesh = context_of(model).mesh["dp_shard"]
        for layer in model.model.layers:
            if way == "submodules":
                fully_shard(layer.self_attn, mesh=mesh)
                fully_shard(layer.mlp, mesh=mesh)
            if way == "linears":
                for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.mlp.up_proj, layer.mlp.down_proj):
                    fully_shard(linear, mesh=mesh)
            fully_shard(layer, mesh=mesh, reshard_after_forward=way != "no-reshard")
        fully_shard(model, mesh=mesh)
        try:
            _train(reference, model, 2, context_of(model).replica, steps=2)
        except AssertionError as error:
            error.add_note(way)
            raise


@pytest.mark.parametrize("options", [{"num_labels": 2}, {"num_labels": 3}])
def test_small_sizes_under_fsdp(pool, options):
    # H41: with 2 labels, or 5 rows of the vocabulary, a rank with an empty part would raise while the others wait.
    pool.run(_small, options, world=4)


def _small(options: dict) -> None:
    reference, model = pair("LlamaForSequenceClassification", vocab_size=5, **options)
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp"))["dp"]
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert_no_empty_part(model)
    assert model.score.weight.placements == (Shard(0), Replicate())
    _train(reference, model, 1, 0, steps=2)


def test_replicas_draw_their_own_masks(pool):
    pool.run(_masks, world=4)


def _masks() -> None:
    torch.manual_seed(dist.get_rank())
    model = build(attention_dropout=0.4, attn_implementation="eager")
    shard(model, tp=2, dp=2)
    shardcore.manual_seed(model, 1)
    tp = context_of(model).tp
    loss = model(**batch(model)).loss
    loss.backward()
    losses = [torch.empty_like(loss) for _ in range(4)]
    dist.all_gather(losses, loss.detach())
    assert losses[0] == losses[1]
    assert losses[2] == losses[3]
    assert losses[0] != losses[2]
    assert tp.size() == 2
    for parameter in model.parameters():
        assert equal_on_ranks(whole(parameter.grad))
