"""A sharded Llama equals the unsharded one at sizes, in uses and in errors beyond those of `test_conformance`."""

from __future__ import annotations

import copy

import pytest
import torch
from llama_cases import assert_no_empty_part, batch, build, compare_forward, pair, shard, train_beside
from torch.distributed.tensor import Replicate, Shard

import shardcore
from shard_llama.policy import LlamaPolicy
from shardcore_testing.parity import assert_same_gradients


def _train(cases: list[tuple[str, dict]], steps: int = 3) -> None:
    for name, options in cases:
        reference, sharded = pair(name, **options)
        assert_no_empty_part(sharded)
        train_beside(reference, sharded, steps=steps)


def test_three_ranks(pool):
    pool.run(
        _train,
        [
            ("LlamaForCausalLM", {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48}),
            ("LlamaForCausalLM", {"num_attention_heads": 6, "num_key_value_heads": 1, "hidden_size": 48}),
        ],
        world=3,
    )


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
@pytest.mark.parametrize(("kv", "ranks"), [(2, 4), (1, 4), (1, 2)])
def test_fewer_kv_heads_than_ranks(pool, kv, ranks, kind):
    # H25; sdpa with a mask repeats the KV heads itself, so that a wrong number of groups is seen there too.
    options = {"num_key_value_heads": kv, "num_attention_heads": 8, "attn_implementation": kind}
    pool.run(_train, [("LlamaForCausalLM", options)], world=ranks)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("vocabulary", [97, 101, 5])
def test_vocabularies_that_do_not_divide(pool, vocabulary, tied):
    # H10; 5 rows at tp 4 would leave the last rank none, so they are replicated.
    pool.run(_vocabulary, vocabulary, tied, world=4)


def _vocabulary(vocabulary: int, tied: bool) -> None:
    reference, sharded = pair(vocab_size=vocabulary, tie_word_embeddings=tied)
    embedding, head = sharded.model.embed_tokens.weight, sharded.lm_head.weight
    assert (head is embedding) == tied
    assert embedding.placements == ((Replicate(),) if vocabulary == 5 else (Shard(0),))
    assert tuple(embedding.shape) == (vocabulary, 64)
    assert len(list(sharded.parameters())) == len(list(reference.parameters()))
    assert_no_empty_part(sharded)
    train_beside(reference, sharded, steps=2)
    # H15: still one parameter after the steps, and what the modules compute with is that parameter.
    assert (sharded.lm_head.weight is sharded.model.embed_tokens.weight) == tied


def test_intermediate_sizes(pool):
    # Everywhere else it is 83, which divides by no number of ranks; 7 over 4 ranks leaves the last one column.
    pool.run(_train, [("LlamaForCausalLM", {"intermediate_size": size}) for size in (96, 7)], 2, world=4)


@pytest.mark.parametrize(("name", "labels"), [("Sequence", 2), ("Sequence", 3), ("Token", 2), ("Token", 3)])
def test_few_labels_are_replicated(pool, name, labels):
    pool.run(_labels, f"LlamaFor{name}Classification", labels, world=4)


def _labels(name: str, labels: int) -> None:
    reference, sharded = pair(name, num_labels=labels, classifier_dropout=0.0)
    assert sharded.score.weight.placements == (Replicate(),)
    assert_no_empty_part(sharded)
    train_beside(reference, sharded, steps=1)


def test_losses_at_their_edges(pool):
    pool.run(_edges, world=2)


def _edges() -> None:
    # H26: with nothing to learn the unsharded loss is 0/0, and so is ours; then a good batch as if nothing happened.
    reference, sharded = pair()
    inputs = batch(reference)
    ignored = {**inputs, "labels": torch.full_like(inputs["labels"], -100)}
    assert torch.isnan(reference(**ignored).loss)
    out = sharded(**ignored)
    assert torch.isnan(out.loss)
    assert not torch.isnan(out.logits).any()
    counted = {"num_items_in_batch": torch.tensor(11)}
    compare_forward(reference, sharded, ignored, **counted)
    assert reference(**ignored, **counted).loss.item() == sharded(**ignored, **counted).loss.item() == 0.0
    compare_forward(reference, sharded, inputs, **counted)
    assert_same_gradients(reference, sharded)
    # Only the last logits, a single token, and embeddings instead of ids.
    for call in ({"logits_to_keep": 2}, {"logits_to_keep": torch.tensor([1, 3])}):
        ids = {"input_ids": inputs["input_ids"]}
        torch.testing.assert_close(reference(**ids, **call).logits, sharded(**ids, **call).logits, rtol=0, atol=1e-10)
    embeds = torch.randn(2, 5, 64, dtype=torch.float64)
    mine, theirs = (embeds.clone().requires_grad_() for _ in range(2))
    reference(inputs_embeds=mine).logits.square().sum().backward()
    sharded(inputs_embeds=theirs).logits.square().sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-9)
    # The padding row of the embedding gets no gradient.
    assert not sharded.model.embed_tokens.weight.grad.full_tensor()[0].any()


def test_one_step_more_of_everything(pool):
    pool.run(_odd_uses, world=2)


def _odd_uses() -> None:
    # Frozen parameters, gradients that were there before sharding, retain_graph, autograd.grad.
    reference = build()
    for name, parameter in reference.named_parameters():
        parameter.requires_grad = "k_proj" not in name and "up_proj.weight" not in name
    reference(**batch(reference, 5)).loss.backward()
    sharded = copy.deepcopy(reference)
    for mine, theirs in zip(sharded.parameters(), reference.parameters(), strict=True):
        mine.grad = None if theirs.grad is None else theirs.grad.clone()
    shard(sharded)
    for model in (reference, sharded):
        loss = model(**batch(reference, 6)).loss
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same_gradients(reference, sharded)
    assert sharded.model.layers[0].self_attn.k_proj.weight.grad is None
    for layer in (0, 1):
        grads = [
            torch.autograd.grad(m(**batch(m, 3)).loss, m.model.layers[layer].mlp.gate_proj.weight)[0]
            for m in (reference, sharded)
        ]
        torch.testing.assert_close(grads[0], grads[1].full_tensor(), rtol=1e-9, atol=1e-12)


def test_sizes_that_cannot_be_split_are_one_error_on_every_rank(pool):
    for rank in pool.run(_plan_errors, world=4):
        more_ranks_than_heads, uneven, kv = rank
        assert "2 query heads (num_attention_heads) cannot be split over 4 ranks" in more_ranks_than_heads
        assert "use a tensor_parallel_size of 1, 2" in more_ranks_than_heads
        assert "6 query heads (num_attention_heads) cannot be split over 4 ranks" in uneven
        assert "use a tensor_parallel_size of 1, 2, 3, 6" in uneven
        assert "3 key/value heads (num_key_value_heads) cannot be shared by 4 ranks" in kv
        assert "nothing was changed" in kv


def _plan_errors() -> list[str]:
    messages = []
    for heads, kv in ((2, 2), (6, 6), (12, 3)):
        model = build(num_attention_heads=heads, num_key_value_heads=kv, hidden_size=48)
        before = copy.deepcopy(model)
        with pytest.raises(shardcore.PlanError) as caught:
            shard(model)
        messages.append(str(caught.value))
        assert type(model) is type(before)
        compare_forward(before, model, batch(model))
    return messages


def test_every_problem_is_in_one_error():
    model = build(num_attention_heads=6, hidden_size=48, num_key_value_heads=6)
    del model.model.layers[1].mlp.up_proj
    with pytest.raises(shardcore.PlanError) as caught:
        shardcore.compile_plan(LlamaPolicy, model, shardcore.ShardConfig(tensor_parallel_size=4))
    text = str(caught.value)
    assert "6 query heads" in text
    assert "model.layers.1: " in text  # H14: a row that matches nothing
    assert "has no submodule" in text
    assert "mlp.up_proj" in text
    assert len(caught.value.problems) >= 2


def test_the_plan_of_a_meta_model_is_the_plan_of_the_model():
    model = build()
    with torch.device("meta"):
        empty = type(model)(model.config).double()
    config = shardcore.ShardConfig(tensor_parallel_size=4)
    plans = [shardcore.compile_plan(LlamaPolicy, m, config) for m in (model, empty)]
    assert plans[0] == plans[1]
    assert plans[0].digest == plans[1].digest
    assert plans[0].config.tensor_parallel_size == 4
    assert {p.name for p in plans[0].parameters} == {name for name, _ in model.named_parameters()}
