"""A Llama whose tokens are divided over the ranks of ``cp`` equals the unsharded one."""

from __future__ import annotations

import copy
from functools import partial
from inspect import signature

import pytest
import torch
from llama_cases import BEFORE_5_5, batch, build, compare_forward, shard
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from transformers import DynamicCache, LlamaForCausalLM

import shardcore
from shardcore._torch import CAN_PIPELINE
from shardcore.errors import ConfigError, NotSupportedError, PlanError
from shardcore.mesh.context import context_of
from shardcore_testing.parity import assert_close, assert_same_gradients, assert_same_parameters, whole
from shardcore_testing.subject import checkpointing

pytestmark = pytest.mark.skipif(BEFORE_5_5, reason="refused: masks are made in another way before transformers 5.5")
_MODES = pytest.mark.parametrize("mode", ["all_to_all", "ring_attn"])
_CLASSES = ("ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "Model")


def _pair(name="LlamaForCausalLM", *, fields=None, **options):
    reference = build(name, attn_implementation="sdpa", **options).eval()
    return reference, shard(copy.deepcopy(reference), cp=2, **(fields or {}))


def _packed(model, length=13):
    """Rows whose positions begin anew."""
    ids = batch(model, 5, length=length, pads=(0,))["input_ids"]
    positions = torch.cat([torch.arange(5), torch.arange(length - 5)]).expand_as(ids)
    return {"input_ids": ids, "labels": ids, "position_ids": positions, "use_cache": False}


def _left(model):
    """Rows padded on the left, of which the first tokens see nothing at all."""
    inputs = batch(model, 6, length=11, pads=(0, 3, 1))
    return {name: value.flip(1) for name, value in inputs.items()}


def _classes(mode):
    for name in _CLASSES:
        reference, sharded = _pair(f"Llama{name}", fields={"context_parallel_mode": mode})
        for seed, length in enumerate((13, 8, 3)):  # of 3 tokens every rank computes all
            compare_forward(reference, sharded, batch(reference, seed, length=length, pads=(0, 1)))
        assert_same_gradients(reference, sharded)


@_MODES
def test_every_class(pool, mode):
    pool.run(_classes, mode)


def _rows(mode, kind):
    reference, sharded = _pair(fields={"context_parallel_mode": mode})
    if kind is not None:
        for model in (reference, sharded):
            checkpointing(model.train(), kind)
    counted = {**batch(reference, 7, length=10, pads=(0, 4)), "num_items_in_batch": torch.tensor(23)}
    own = torch.rand(3, 1, 13, 13, generator=torch.Generator().manual_seed(0)) > 0.4
    own |= torch.eye(13, dtype=torch.bool)
    given = {**_packed(reference), "attention_mask": own}
    for inputs in (_packed(reference), _left(reference), counted, given):
        compare_forward(reference, sharded, inputs)
    assert_same_gradients(reference, sharded)


@_MODES
@pytest.mark.parametrize("kind", [None, {"use_reentrant": False}, {"use_reentrant": True}], ids=["kept", "non", "re"])
def test_packed_and_padded_rows(pool, mode, kind):
    pool.run(_rows, mode, kind)


def _logits():
    reference, sharded = _pair(fields={"parallel_output": True})
    inputs = batch(reference, length=13)
    wanted, got = reference(**inputs, output_hidden_states=True), sharded(**inputs, output_hidden_states=True)
    assert got.logits.to_local().shape == (3 * (6 + context_of(sharded).axis("cp").rank), reference.config.vocab_size)
    assert_close(wanted.logits, got.logits.full_tensor(), "logits")
    for one, other in zip(wanted.hidden_states, got.hidden_states, strict=True):
        assert_close(one, other, "hidden states")
    # A loss of one's own, of logits without labels: they are whole.
    ids = inputs["input_ids"]
    for model in (reference, sharded):
        model.zero_grad()
        cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0).backward()
    assert_same_gradients(reference, sharded)
    assert set(sharded(ids)) == {"logits"}  # no cache of some tokens
    # The parts of a model, called one after the other.
    hidden = sharded.model(ids).last_hidden_state
    assert_close(reference(ids).logits, sharded.lm_head(hidden), "logits of hidden states")


def test_what_is_returned(pool):
    pool.run(_logits)


def _four(fields):
    reference, sharded = _pair(fields=fields)
    for inputs in (batch(reference, length=13), _packed(reference)):
        wanted, got = reference(**inputs), sharded(**inputs)
        assert_close(wanted.loss, got.loss, "loss")
        assert_close(
            wanted.logits, whole(got.logits) if "parallel_output" not in fields else got.logits.full_tensor(), "logits"
        )
        wanted.loss.backward()
        got.loss.backward()
    assert_same_gradients(reference, sharded)


def _both():
    """Two heads on four ranks: two exchange heads, and keys go round between two such pairs."""
    reference = build(num_attention_heads=2, num_key_value_heads=1, attn_implementation="sdpa")
    sharded = shard(copy.deepcopy(reference), cp=4)
    for inputs in (batch(reference, length=21), _packed(reference, 17), _left(reference)):
        compare_forward(reference, sharded, inputs)
    assert_same_gradients(reference, sharded)


def _steps(fields):
    """Replicas with rows of their own, each of two ranks: clipped by one norm, and stepped."""
    reference, sharded = _pair(fields=fields)
    context = context_of(sharded)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-2) for m in (reference, sharded)]
    for seed in range(3):
        ids = batch(reference, seed, rows=4, length=11, pads=(0,))["input_ids"]
        own = ids.chunk(context.sizes.replicas)[context.replica]
        reference(ids, labels=ids).loss.backward()
        sharded(own, labels=own).loss.backward()
        norms = [clip_grad_norm_(m.parameters(), 0.5) for m in (reference, sharded)]
        assert_close(norms[0], whole(norms[1]), "norm")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(reference, sharded)


def _on_four_ranks():
    for fields in (
        {"tp": 2},
        {"tp": 2, "enable_sequence_parallelism": True, "parallel_output": True, "context_parallel_mode": "ring_attn"},
    ):
        _four(fields)
    _both()
    _steps({"dp": 2})


def test_with_tensor_and_data_parallelism(pool):
    pool.run(_on_four_ranks, world=4)


def _resumed(folder):
    """What two ranks of cp have saved goes on at tp 2, with the optimizer's state."""
    found = []
    for fields in ({"cp": 2}, {"tp": 2}):
        model = shard(build(attn_implementation="sdpa").eval(), **fields)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)
        if found:
            shardcore.load_checkpoint(folder, model, optimizer)
        for seed in range(len(found), 2):
            model(**batch(model, seed, length=13)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if not seed:
                shardcore.save_checkpoint(folder, model, optimizer)
        found.append(model(**batch(model, 2, length=13)).loss)
    assert_close(found[0], found[1], "loss after a step on another mesh")


def test_a_checkpoint_on_another_mesh(pool, tmp_path):
    pool.run(_resumed, str(tmp_path / "saved"))


def _dropped(mode):
    """Masks are those of the seed, also in a recomputed block, and other ones on each rank."""
    losses = []
    for kind in (None, {"use_reentrant": False}):
        model = shard(build(attention_dropout=0.4, attn_implementation="sdpa"), cp=2, context_parallel_mode=mode)
        if kind is not None:
            checkpointing(model.train(), kind)
        shardcore.manual_seed(model.train(), 3)
        losses.append(model(**batch(model, length=12)).loss)
        losses[-1].backward()
        losses.append(model.model.layers[0].self_attn.v_proj.weight.grad.full_tensor())
        losses.append(model(**batch(model, length=12)).loss)
    torch.testing.assert_close(losses[:3], losses[3:], rtol=0, atol=0)
    assert losses[0] != losses[2]


def test_dropout(pool):
    pool.run(_dropped, "all_to_all")


def _generated(mode):
    reference, sharded = _pair(fields={"context_parallel_mode": mode})
    ids = batch(reference, length=9, pads=(0,))["input_ids"]
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(reference.eval().generate(ids, **options), sharded.eval().generate(ids, **options))
    cache = DynamicCache(config=sharded.config)
    name = "cache" if "cache" in signature(LlamaForCausalLM.forward).parameters else "past_key_values"
    sharded(ids, **{name: cache})
    assert cache.get_seq_length() == 9


@_MODES
def test_generation(pool, mode):
    pool.run(_generated, mode)


def _stages(fields):
    """Micro-batches with unlike numbers of labels, blocks that are recomputed, steps, evaluations between them."""
    reference, sharded = _pair(fields=fields, num_hidden_layers=4)
    checkpointing(sharded, {"use_reentrant": False})
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-2) for m in (reference, sharded)]
    for seed in range(3):
        inputs = batch(reference, seed, rows=4, length=11, pads=(0, 5, 1, 2))
        wanted = reference(**inputs).loss
        wanted.backward()
        assert_close(wanted, sharded.train_step(inputs), "loss")
        assert_close(wanted, sharded.eval_step(inputs), "loss in evaluation")
        norm = torch.stack([p.grad.square().sum() for p in reference.parameters()]).sum().sqrt()
        assert_close(norm, shardcore.grad_norm(sharded), "norm")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        assert_close(reference(**inputs).logits, sharded(**inputs).logits, "logits")
    parameters = dict(reference.named_parameters())
    for name, parameter in sharded.named_parameters():
        assert_close(parameters[name], whole(parameter), name)


@pytest.mark.skipif(not CAN_PIPELINE, reason="pipelines need torch 2.13")
@pytest.mark.parametrize("mode", ["all_to_all", "ring_attn"])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_in_stages(pool, mode, schedule):
    fields = {"pp": 2, "num_microbatches": 2, "pipeline_schedule": schedule, "context_parallel_mode": mode}
    pool.run(_stages, fields, world=4)


def _refuses():
    plain = partial(build, attn_implementation="sdpa")
    for model, fields, error, words in (
        (plain(), {"cp": 2, "wrap": False}, ConfigError, "leave wrap=True"),
        (plain(), {"cp": 2, "enable_flash_attention": True}, NotSupportedError, "leave one of them out"),
        (plain(), {"dp": 2, "context_parallel_mode": "ring_attn"}, ConfigError, "give context_parallel_size too"),
        (
            plain(num_attention_heads=1, num_key_value_heads=1),
            {"cp": 2, "context_parallel_mode": "all_to_all"},
            PlanError,
            "say context_parallel_mode='auto'",
        ),
        (plain(attention_dropout=0.1), {"cp": 2, "context_parallel_mode": "ring_attn"}, PlanError, "dropout 0.1"),
        (build(attn_implementation="eager"), {"cp": 2, "context_parallel_mode": "ring_attn"}, PlanError, "'sdpa'"),
    ):
        before = dict(vars(model))
        with pytest.raises(error, match=words):
            shard(model, **fields)
        assert vars(model) == before
    reference, sharded = _pair()
    inputs = batch(reference, length=13)
    for call, words in (
        ({"output_attentions": True}, "S x S"),
        ({"use_cache": True}, "give the cache|Give the cache"),
        ({"cu_seq_lens_q": torch.arange(3)}, "does not know whether it has a value for each token"),
    ):
        with pytest.raises(NotSupportedError, match=words):
            sharded(**inputs, **call)
    compare_forward(reference, sharded, inputs)  # it was not harmed
    sharded.set_attn_implementation("sdpa")
    with pytest.raises(NotSupportedError, match="not the one that it had in shard"):
        sharded(inputs["input_ids"])


def test_what_is_refused(pool):
    pool.run(_refuses)
