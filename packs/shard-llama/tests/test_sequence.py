"""A Llama whose tokens are split over the ranks outside regions equals the unsharded one."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from llama_cases import BEFORE_5_5, batch, build, compare_forward, loss_of, shard, train_beside
from torch.utils.checkpoint import checkpoint

from shardcore._torch import SCALES_PARTIAL
from shardcore.errors import NotSupportedError
from shardcore.nn.sequence.tokens import SequenceStack
from shardcore_testing.observing import Collectives
from shardcore_testing.parity import assert_close, assert_same_gradients
from shardcore_testing.subject import checkpointing


def _pair(name="LlamaForCausalLM", *, fields=None, **options):
    reference = build(name, **options)
    sharded = shard(
        copy.deepcopy(reference), tp=dist.get_world_size(), enable_sequence_parallelism=True, **(fields or {})
    )
    return reference, sharded


def _lengths(name, lengths, kind=None, **options):
    reference, sharded = _pair(name, **options)
    if kind is not None:
        for model in (reference, sharded):
            checkpointing(model.train(), kind)
    for seed, length in enumerate(lengths):
        compare_forward(reference, sharded, batch(reference, seed, length=length, pads=(0, min(1, length - 1))))
        (stack,) = (m for m in sharded.modules() if isinstance(m, SequenceStack))
        assert stack._tokens.last == (None if length < dist.get_world_size() else length)
    assert_same_gradients(reference, sharded)


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_any_length(pool, tp):
    options = {"num_attention_heads": 12, "num_key_value_heads": 12, "hidden_size": 48} if tp == 3 else {}
    pool.run(_lengths, "LlamaForCausalLM", (8, 13, 7, 5, 4, 3), world=tp, **options)
    pool.run(_lengths, "LlamaModel", (2, 1, 5), world=tp, **options)


@pytest.mark.parametrize(
    "kind", [{"use_reentrant": False}, {"use_reentrant": True}], ids=["non-reentrant", "reentrant"]
)
def test_checkpointing(pool, kind):
    pool.run(_lengths, "LlamaForCausalLM", (13, 8), kind, world=2)


def _two_alive(kind):
    reference, sharded = _pair()
    for model in (reference, sharded):
        checkpointing(model.train(), kind)
        losses = [loss_of(model(**batch(reference, length, length=length, pads=(0,)))) for length in (13, 14)]
        sum(losses).backward()
    assert_same_gradients(reference, sharded)


@pytest.mark.parametrize(
    "kind", [{"use_reentrant": False}, {"use_reentrant": True}], ids=["non-reentrant", "reentrant"]
)
def test_two_lengths_alive(pool, kind):
    pool.run(_two_alive, kind, world=2)


def _training(fields, **options):
    reference, sharded = _pair(fields=fields, **options)
    train_beside(reference, sharded)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "fields",
    [
        {},
        pytest.param(
            {"partial_gradients": "deferred"},
            marks=pytest.mark.skipif(not SCALES_PARTIAL, reason="before torch 2.13 partial gradients are refused"),
        ),
        {"sequence_keep_gathered": False},
    ],
)
def test_training(pool, fields):
    pool.run(_training, fields, world=2)


@pytest.mark.parametrize("keep", [True, False])
def test_shared_kv_heads(pool, keep):
    # Where the tokens are gathered again for the backward, so are the weights' gradients computed only then.
    pool.run(_training, {"sequence_keep_gathered": keep}, num_key_value_heads=2, world=4)


def _cost(layers, fields):
    _, sharded = _pair(num_hidden_layers=layers, fields=fields)
    with Collectives() as seen:
        loss = loss_of(sharded(**batch(sharded, length=7)))
        forward = seen.take()
        loss.backward()
        return forward, seen.take()


@pytest.mark.parametrize(
    ("fields", "backward"),
    [
        ({}, 8),  # and one for each norm and each row bias
        ({"partial_gradients": "deferred"}, 4),
        ({"partial_gradients": "deferred", "sequence_keep_gathered": False}, 6),
    ],
)
def test_four_gathers_and_four_scatters_for_a_layer(pool, fields, backward):
    for two, three in zip(pool.run(_cost, 2, fields, world=2), pool.run(_cost, 3, fields, world=2), strict=True):
        assert (three[0] - two[0], three[1] - two[1]) == (4, backward)


def _from_the_embedding():
    """A hook on the embedding sees all tokens; where it is on one rank only, both send the same all the same."""
    reference, sharded = _pair()
    inputs = batch(reference, length=7)
    wanted = loss_of(reference(**inputs)).item()
    seen_whole = []
    for ranks in ((0, 1), (0,)):
        hooked = dist.get_rank() in ranks
        hook = lambda module, args, out: seen_whole.append(out)  # noqa: E731
        handle = sharded.model.embed_tokens.register_forward_hook(hook) if hooked else None
        assert loss_of(sharded(**inputs)).item() == pytest.approx(wanted, rel=1e-7)  # the loss is in float32
        if handle is not None:
            handle.remove()
    assert_close(reference.model.embed_tokens(inputs["input_ids"]), seen_whole[0], "what a hook sees", 1e-12)


def test_hooks_on_the_embedding(pool):
    pool.run(_from_the_embedding, world=2)


def _between():
    """Somebody between the embedding and the first block: its output is shown to another module on the way."""

    def twice(module, args):
        args[0].mul_(2.0)

    reference, sharded = _pair()
    inputs = batch(reference, length=7)
    for model in (reference, sharded):
        model.model.rotary_emb.register_forward_pre_hook(twice)
    losses = [loss_of(model(**inputs)) for model in (reference, sharded)]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-7)
    assert_same_gradients(reference, sharded)


def test_somebody_between_the_embedding_and_the_first_block(pool):
    pool.run(_between, world=2)


def _captured():
    reference, sharded = _pair(attn_implementation="eager")
    inputs = batch(reference, length=7, pads=(0, 2))
    outs = [model(**inputs, output_hidden_states=True, output_attentions=True) for model in (reference, sharded)]
    for name in ("hidden_states", "attentions"):
        wanted, got = (out[name] for out in outs)
        assert len(wanted) == len(got)
        for a, b in zip(wanted, got, strict=True):
            assert_close(a, b, name, 1e-12)
    for out in outs:
        sum((t * torch.arange(t.numel()).view_as(t).cos()).sum() for t in out.hidden_states).backward()
    assert_same_gradients(reference, sharded)


def test_captured_outputs(pool):
    pool.run(_captured, world=2)


class _Checkpointed(torch.nn.Module):
    """A checkpoint around the call of a layer, as users put it there."""

    def __init__(self, layer, reentrant):
        super().__init__()
        self.layer, self.reentrant = layer, reentrant

    def forward(self, x, **kwargs):
        return checkpoint(lambda x: self.layer(x, **kwargs), x, use_reentrant=self.reentrant)


def _by_hand(reentrant):
    reference, sharded = _pair()
    inputs = batch(reference, length=7, pads=(0,))
    losses = []
    for model in (reference, sharded):
        layers = [_Checkpointed(layer, reentrant) for layer in model.model.layers]
        model.model.layers = torch.nn.ModuleList(layers)
        losses.append(loss_of(model(**inputs)))
        model.model.layers = torch.nn.ModuleList(layer.layer for layer in layers)
    losses[0].backward()
    if reentrant:
        with pytest.raises(NotSupportedError, match="use_reentrant=False"):
            losses[1].backward()
    else:
        losses[1].backward()
        assert_same_gradients(reference, sharded)


def _offloaded():
    reference, sharded = _pair()
    for model in (reference, sharded):
        layers = list(model.model.layers)
        model.model.layers = torch.nn.ModuleList(_Checkpointed(layer, False) for layer in layers)
        with torch.autograd.graph.save_on_cpu():
            loss = loss_of(model(**batch(model, length=7)))
        model.model.layers = torch.nn.ModuleList(layers)
        loss.backward()
    assert_same_gradients(reference, sharded)


def test_a_checkpoint_by_hand_of_copies(pool):
    pool.run(_offloaded, world=2)


def _nested():
    """A layer that calls the model it is in, for another number of tokens."""
    reference, sharded = _pair()
    inputs, other = batch(reference, length=7), batch(reference, 1, length=4)

    def call(module, args):
        if not running:
            running.append(1)
            with torch.no_grad():
                inner.append(loss_of(model(**other)).item())
            running.clear()

    results = []
    for model in (reference, sharded):
        running, inner = [], []
        handle = model.model.layers[1].register_forward_pre_hook(call)
        out = model(**inputs, output_hidden_states=True)
        handle.remove()
        loss_of(out).backward()
        results.append((out, inner))
    (wanted, first), (got, second) = results
    assert first == pytest.approx(second, rel=1e-6)
    for mine, theirs in zip(wanted.hidden_states, got.hidden_states, strict=True):
        assert_close(mine, theirs, "hidden states", 1e-12)
    assert_same_gradients(reference, sharded)


@pytest.mark.skipif(BEFORE_5_5, reason="transformers returns hidden states of both calls before 5.5")
def test_a_forward_inside_of_a_forward(pool):
    pool.run(_nested, world=2)


def _inference_mode():
    reference, sharded = _pair()
    inputs = batch(reference, length=7)
    with torch.inference_mode():
        assert_close(reference(**inputs).logits, sharded(**inputs).logits, "logits", 1e-12)


def test_inference_mode(pool):
    pool.run(_inference_mode, world=2)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_by_hand(pool, reentrant):
    pool.run(_by_hand, reentrant, world=2)


def _alone():
    reference, sharded = _pair()
    compare_forward(reference, sharded, batch(reference, length=7))
    _compare_alone(reference, sharded)


def _compare_alone(reference, sharded):
    x = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for model in (reference, sharded):
        model.zero_grad()
        norm, mlp = model.model.layers[0].input_layernorm, model.model.layers[0].mlp
        out = model.model.norm(mlp(norm(x)))
        out.sum().backward()
    assert_same_gradients(reference, sharded)


def test_modules_called_alone(pool):
    pool.run(_alone, world=2)


def _exception():
    reference, sharded = _pair()

    def fail(module, args):
        raise KeyboardInterrupt

    handle = sharded.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        sharded(**batch(reference, length=7))
    handle.remove()
    _compare_alone(reference, sharded)  # whose tokens are whole
    reference.zero_grad()
    sharded.zero_grad()
    compare_forward(reference, sharded, batch(reference, length=9))
    assert_same_gradients(reference, sharded)


def test_after_an_exception(pool):
    pool.run(_exception, world=2)
