"""Logits that stay split over the vocabulary, and the loss from their parts, whole or in chunks of tokens."""

from __future__ import annotations

import copy
import os

import pytest
import torch
import torch.distributed as dist
from llama_cases import batch, build, shard
from resident import Peak
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import cross_entropy

from shardcore.errors import NotSupportedError, WrapError
from shardcore_testing.observing import Collectives
from shardcore_testing.parity import assert_close, assert_same_gradients


def _in_double(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **_):
    """Compute what transformers' loss does, without its step through float32."""
    if shift_labels is None:
        shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    how = "mean" if num_items_in_batch is None else "sum"
    loss = cross_entropy(
        logits.view(-1, vocab_size), shift_labels.reshape(-1), ignore_index=ignore_index, reduction=how
    )
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def _pair(chunk=None, **options):
    reference = build(**options)
    chunks = {} if chunk is None else {"loss_chunk_size": chunk}
    sharded = shard(copy.deepcopy(reference), tp=dist.get_world_size(), parallel_output=True, **chunks)
    reference.loss_function = _in_double
    return reference, sharded


def _losses(chunk, vocabulary, tied):
    heads = (
        {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48} if dist.get_world_size() == 3 else {}
    )
    reference, sharded = _pair(chunk, vocab_size=vocabulary, tie_word_embeddings=tied, **heads)
    inputs = batch(reference)
    count = int((inputs["labels"] != -100).sum())
    shifted = inputs["labels"].roll(-1, 1)
    calls = (
        inputs,
        {**inputs, "num_items_in_batch": 2 * count},
        {**inputs, "num_items_in_batch": torch.tensor(count)},
        {**inputs, "shift_labels": shifted},
        {**inputs, "labels": torch.full_like(inputs["labels"], -100), "num_items_in_batch": 5},
    )
    for call in calls:
        wanted, got = reference(**call), sharded(**call)
        assert_close(wanted.loss, got.loss, "loss", 1e-12)
        if chunk is None:
            assert isinstance(got.logits, DTensor)
            assert got.logits.placements == (Shard(2),)
            assert_close(wanted.logits, got.logits.full_tensor(), "logits", 1e-12)
        (3 * wanted.loss).backward()
        (3 * got.loss).backward()
    assert_same_gradients(reference, sharded)


def _head_replaced():
    reference, sharded = _pair(5)
    with pytest.raises(WrapError, match="functional_call with whole tensors"):
        torch.func.functional_call(sharded, {"lm_head.weight": reference.lm_head.weight}, (), batch(reference))


def test_a_whole_head_in_its_place_is_refused(pool):
    pool.run(_head_replaced, world=2)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("tp", "vocabulary", "tied"), [(2, 101, False), (3, 97, True), (4, 32003, True), (4, 7, False)]
)
@pytest.mark.parametrize("chunk", [None, 5, 1000])
def test_losses(pool, tp, vocabulary, tied, chunk):
    pool.run(_losses, chunk, vocabulary, tied, world=tp)


def _nothing_to_learn(chunk):
    reference, sharded = _pair(chunk)
    inputs = batch(reference)
    inputs["labels"].fill_(-100)
    assert reference(**inputs).loss.isnan()
    assert sharded(**inputs).loss.isnan()


@pytest.mark.parametrize("chunk", [None, 5])
def test_all_labels_ignored(pool, chunk):
    pool.run(_nothing_to_learn, chunk, world=2)


def _without_labels():
    reference, sharded = _pair()
    inputs = batch(reference, pads=(0,))
    sharded(**inputs).loss.backward()
    labels = inputs.pop("labels")
    assert_close(reference(**inputs).logits, sharded(**inputs).logits, "logits", 1e-12)
    way = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(reference.eval().generate(**inputs, **way), sharded.eval().generate(**inputs, **way))
    out = sharded(**inputs, labels=labels)
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        out.logits + torch.ones(101)
    assert type(sharded(**inputs, labels=labels, return_dict=False)[1]) is DTensor


def test_without_labels_logits_are_whole(pool):
    pool.run(_without_labels, world=2)


def _cost():
    _, sharded = _pair()
    inputs = batch(sharded)
    counts = []
    for labels in (inputs["labels"], None):
        with Collectives() as seen:
            out = sharded(**{**inputs, "labels": labels})
            counts.append(seen.take())
            (out.logits.float().sum() if labels is None else out.loss).backward()
            counts.append(seen.take())
    return counts


def test_two_collectives_instead_of_one_large(pool):
    for counts in pool.run(_cost, world=2):
        assert counts[0] == counts[2] + 1  # two small ones, no gathered logits
        assert counts[1] == counts[3]


def _refusals():
    _, sharded = _pair(5)
    inputs = batch(sharded)
    out = sharded(**inputs)
    with pytest.raises(NotSupportedError, match="split over the vocabulary"):
        out.logits.argmax(-1)
    with pytest.raises(NotSupportedError, match="split over the vocabulary"):
        torch.softmax(out.logits, -1)
    seen = []
    sharded.loss_function = lambda logits, labels, **_: seen.append(logits) or cross_entropy(logits[0], labels[0])
    sharded(**inputs)
    assert not hasattr(seen[0], "full_tensor")
    assert getattr(seen[0], "argmax", None) is None
    with pytest.raises(NotSupportedError, match="'argmax' is not computed on parts"):
        seen[0].argmax(-1)
    sharded.loss_function = lambda logits, labels, **_: torch.softmax(logits, -1).sum()
    with pytest.raises(NotSupportedError, match="softmax"):
        sharded(**inputs)
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    mask = torch.ones(inputs["labels"].shape, dtype=torch.bool)
    refused = [lambda logits: logits * scale, lambda logits: torch.div(logits, scale), lambda logits: logits[mask, :20]]
    refused += [lambda logits: logits.transpose(1, 2), lambda logits: logits.transpose(-1, 0)]
    refused += [lambda logits: logits.view(-1, 2), lambda logits: logits.reshape(-1), lambda logits: logits.flatten()]
    _, kept = _pair()  # logits that are there
    for ask in refused:
        kept.loss_function = lambda logits, labels, ask=ask, **_: ask(logits)
        with pytest.raises(NotSupportedError, match=r"needs a gradient|the selection|a view as|flattening|a transp"):
            kept(**inputs)
    del sharded._loss_function
    with pytest.raises(IndexError, match="from 0 to 101"):
        sharded(**{**inputs, "labels": inputs["labels"].clamp(min=101)})


def test_what_cannot_be_computed_raises(pool):
    pool.run(_refusals, world=2)


def _functional():
    """What a user's own loss may ask of torch's cross entropy."""
    reference, sharded = _pair()
    inputs = batch(reference, pads=(0,))
    labels = inputs.pop("labels")
    labels[0, 0] = -7
    for options in ({"label_smoothing": 0.1}, {"reduction": "sum"}, {"label_smoothing": 0.3, "reduction": "none"}):

        def loss(logits, labels, options=options, **_):
            return cross_entropy(
                logits[..., :-1, :].flatten(0, 1) / 2, labels[..., 1:].flatten(), ignore_index=-7, **options
            ).sum()

        losses = []
        for model in (reference, sharded):
            model.loss_function = loss
            losses.append(model(**inputs, labels=labels).loss)
            losses[-1].backward()
        assert_close(*losses, str(options), 1e-12)
    assert_same_gradients(reference, sharded)


def test_label_smoothing_and_reductions(pool):
    pool.run(_functional, world=2)


def _one_token(logits, labels, **_):
    """Ask for one token, for some tokens, and for rounded quotients."""
    chosen = labels != -7
    return (
        cross_entropy(logits[0, 0], labels[0, 0].to(torch.uint8))
        + cross_entropy(logits[chosen], labels[chosen])
        + cross_entropy(torch.div(logits, 0.01, rounding_mode="floor").flatten(0, 1), labels.flatten()).detach()
    )


def _other_uses():
    reference, sharded = _pair()
    inputs = batch(reference, pads=(0,))
    losses = []
    for model in (reference, sharded):
        model.loss_function = _one_token
        losses.append(model(**inputs).loss)
        losses[-1].backward()
    assert_close(*losses, "loss", 1e-12)
    assert_same_gradients(reference, sharded)
    # A call without labels inside of one with labels.
    sharded.loss_function = lambda logits, labels, **_: sharded(input_ids=labels).logits.argmax(-1).sum()
    reference.loss_function = lambda logits, labels, **_: reference(input_ids=labels).logits.argmax(-1).sum()
    assert reference(**inputs).loss == sharded(**inputs).loss


def test_other_uses_of_logits(pool):
    pool.run(_other_uses, world=2)


def _wrapped_head():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    reference = build()
    inputs = batch(reference)
    for chunk in ({}, {"loss_chunk_size": 5}):
        fields = {"parallel_output": True, **chunk}
        sharded = shard(copy.deepcopy(reference), device_mesh=mesh, wrap=False, **fields)
        fully_shard(sharded.lm_head, mesh=mesh["dp_shard"])
        fully_shard(sharded, mesh=mesh["dp_shard"])
        with pytest.raises(NotSupportedError, match="head to the fully_shard of the model"):
            sharded(**inputs)
        sharded(**{**inputs, "labels": None}).logits.sum().backward()


@pytest.mark.newest
def test_a_head_that_fsdp_wraps_by_itself(pool):
    pool.run(_wrapped_head, world=4)


def _with_replicas(chunk):
    reference = build()
    sharded = shard(copy.deepcopy(reference), tp=2, dp=2, parallel_output=True, **chunk)
    reference.loss_function = _in_double
    inputs = batch(reference)
    for model in (reference, sharded):
        model(**inputs).loss.backward()
    assert_same_gradients(reference, sharded)


@pytest.mark.parametrize("chunk", [{}, {"loss_chunk_size": 5}], ids=["kept", "chunks"])
def test_with_replicas(pool, chunk):
    pool.run(_with_replicas, chunk, world=4)


@pytest.mark.newest
@pytest.mark.nightly
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux to measure peaks")
def test_memory_of_head_and_loss(pool):
    for way in pool.run(_memory, world=2, timeout=200):
        assert way["gathered"] > 4 * way["chunks"], way
        assert way["gathered"] > 1.5 * way["split"], way


def _memory():
    ids = torch.randint(0, 128_256, (1, 1024), generator=torch.Generator().manual_seed(0))
    # Blocks above 32 MiB are given back to the system when they are freed; glibc may keep smaller ones.
    grown = {}
    ways = {"gathered": {}, "split": {"parallel_output": True}}
    for way, fields in {**ways, "chunks": {"parallel_output": True, "loss_chunk_size": 160}}.items():
        model = build(vocab_size=128_256, num_hidden_layers=1, tie_word_embeddings=False, dtype=torch.float32)
        shard(model, tp=2, **fields)
        model(input_ids=ids[:, :8], labels=ids[:, :8]).loss.backward()  # what the first step allocates for good
        peaks = []
        for _ in range(2):
            with Peak() as peak:
                model(input_ids=ids, labels=ids).loss.backward()
            peaks.append(peak.bytes)
        grown[way] = min(peaks)
    return grown
