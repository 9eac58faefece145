"""Stacks and layers of torch: both orders of dims, norms first, activations, and the ways past their own forward."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardcore
from shard_torch.cases import build
from shardcore.errors import NotSupportedError, PlanError
from shardcore_testing import randomized
from shardcore_testing.pack import policy_of, shard_by
from shardcore_testing.parity import assert_close, assert_same_gradients, equal_on_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True, but:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
]
PLUGIN = "shard_torch.plugin"
B, L, S, E, H = 3, 5, 7, 48, 4


def _twins(kind: str, **options: Any) -> tuple[Any, Any]:
    tokens = options.pop("tokens", False)
    reference = build(kind, **{"heads": H, **options})
    sharded = shard_by(PLUGIN, copy.deepcopy(reference), tp=dist.get_world_size(), enable_sequence_parallelism=tokens)
    return reference, sharded


def _states(*sizes: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*sizes, E, generator=generator, dtype=torch.float64).requires_grad_()


def _beside(reference: Any, sharded: Any, *states: Tensor, **masks: Any) -> None:
    """Compare what is returned, and the gradients of parameters and states."""
    given = [[x.detach().clone().requires_grad_() for x in states] for _ in range(2)]
    wanted, got = (m(*own, **masks) for m, own in zip((reference, sharded), given, strict=True))
    assert_close(wanted, got, "output")
    assert equal_on_ranks(got)
    weights = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    for out in (wanted, got):
        (out * weights).mean().backward()
    for mine, theirs in zip(*given, strict=True):
        assert_close(mine.grad, theirs.grad, "gradient of states")
    assert_same_gradients(reference, sharded)


#: What layers are made with.
MADE: dict[str, dict[str, Any]] = {
    "norms first": {"norm_first": True},
    "rows second": {"batch_first": False},
    "rows second, norms first, no bias": {"batch_first": False, "norm_first": True, "bias": False},
    "gelu": {"activation": "gelu"},
    "silu": {"activation": F.silu},
    "learned": {"activation": nn.PReLU(init=0.3)},  # torch's own copies of decoder layers lose it
    "no last norm": {"norm": False},
}


@pytest.mark.nightly
@pytest.mark.parametrize("tokens", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("world", [2, 3])
def test_stacks(pool, world, tokens):
    pool.run(_stacks, tokens, world=world)


def _stacks(tokens: bool) -> None:
    causal = nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64)
    of_heads = torch.rand(B * H, L, L, generator=torch.Generator().manual_seed(5)) > 0.7
    of_heads[..., 0] = False
    padding = torch.arange(S) >= torch.tensor([7, 4, 6])[:, None]
    for made, options in MADE.items():
        first = options.get("batch_first", True)
        order: Callable[[Tensor], Tensor] = (lambda x: x) if first else (lambda x: x.transpose(0, 1))
        try:
            reference, sharded = _twins("TransformerEncoder", **options, tokens=tokens)
            for mask in (causal, of_heads, None):
                _beside(reference, sharded, order(_states(B, L)), mask=mask)
            _beside(reference, sharded, order(_states(B, S, seed=1)), src_key_padding_mask=padding)
            _beside(reference, sharded, _states(L, seed=2))  # without rows
            if made == "learned":
                continue
            reference, sharded = _twins("TransformerDecoder", **options, tokens=tokens)
            given = {"memory_key_padding_mask": padding, "memory_mask": torch.zeros(L, S, dtype=torch.bool)}
            for mask in (causal, of_heads):
                _beside(reference, sharded, order(_states(B, L)), order(_states(B, S, seed=1)), tgt_mask=mask, **given)
            if "norm" not in options:
                reference, sharded = _twins("Transformer", **options, tokens=tokens)
                states = order(_states(B, S)), order(_states(B, L, seed=1))
                _beside(reference, sharded, *states, tgt_mask=causal, tgt_is_causal=True)
        except Exception as error:
            error.add_note(made)
            raise


# --- evaluation without gradients: one kernel for a layer, and nested tensors --------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("tokens", [False, True], ids=["whole", "split"])
def test_evaluation(pool, tokens):
    pool.run(_evaluated, tokens, world=2)


def _evaluated(tokens: bool) -> None:
    end = torch.arange(S) >= torch.tensor([7, 4, 6])[:, None]
    middle = torch.arange(S) == torch.tensor([2, 7, 5])[:, None]
    floats = torch.zeros(B, S, dtype=torch.float64).masked_fill(end, float("-inf"))
    for options in ({}, {"norm": False}, {"activation": "gelu"}, {"norm_first": True}, {"batch_first": False}):
        reference, sharded = (m.eval() for m in _twins("TransformerEncoder", **options, tokens=tokens))
        x = _states(B, S).detach()
        x = x if options.get("batch_first", True) else x.transpose(0, 1)
        for masks in (
            {},
            {"src_key_padding_mask": end},  # nested tensors
            {"src_key_padding_mask": floats},
            {"src_key_padding_mask": middle},
            {"src_key_padding_mask": end, "mask": torch.zeros(S, S, dtype=torch.bool)},
        ):
            with torch.no_grad():
                assert_close(reference(x, **masks), sharded(x, **masks), f"{options} {list(masks)}")
            _beside(reference, sharded, x, **masks)  # gradients are wanted: nothing is nested
        for m in (reference, sharded):
            m.requires_grad_(False)
        assert_close(reference(x, src_key_padding_mask=end), sharded(x, src_key_padding_mask=end), "frozen")
    generator = torch.Generator().manual_seed(2)
    added = [torch.randn(size, S, dtype=torch.float64, generator=generator) for size in (B, S)]
    reference, sharded = (m.eval() for m in _twins("TransformerEncoder", tokens=tokens))
    for masks in (
        {"src_key_padding_mask": end},
        {"src_key_padding_mask": added[0]},
        {"mask": added[1], "src_key_padding_mask": added[0]},
    ):
        # Torch's kernel for a whole layer does not add such masks.
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            wanted = reference(x.transpose(0, 1), **masks)
            assert_close(wanted, sharded(x.transpose(0, 1), **masks), "no fast path")
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
        if masks.get("src_key_padding_mask") is not end:
            with torch.no_grad():
                assert_close(wanted, sharded(x.transpose(0, 1), **masks), "added")


def test_padding_is_nothing_where_torch_takes_it_out(pool):
    pool.run(_nothing, world=2)


def _nothing() -> None:
    _, sharded = (m.eval() for m in _twins("TransformerEncoder", norm=False))
    padding = torch.arange(S) >= torch.tensor([7, 4, 6])[:, None]
    x = _states(B, S).detach()
    with torch.no_grad():
        assert not sharded(x, src_key_padding_mask=padding)[padding].any()
    assert sharded(x, src_key_padding_mask=padding)[padding].all()
    sharded.mask_check = False
    with torch.no_grad(), pytest.raises(NotSupportedError, match="padding that is not at the end of its rows"):
        sharded(x, src_key_padding_mask=padding.flip(1))


def test_one_layer_runs_its_parts_in_evaluation(pool):
    pool.run(_layer, world=2)


def _note(called: list[str], name: str, *_: Any) -> None:
    called.append(name)


def _layer() -> None:
    x = _states(B, L).detach()
    for options in ({}, {"norm_first": True}, {"activation": "gelu"}):
        reference, sharded = (m.eval() for m in _twins("TransformerEncoderLayer", **options))
        called: list[str] = []
        for name in ("linear1", "self_attn"):
            sharded.get_submodule(name).register_forward_hook(functools.partial(_note, called, name))
        padding = torch.arange(L) >= torch.tensor([5, 4, 3])[:, None]
        with torch.no_grad():
            for masks in ({}, {"src_key_padding_mask": padding}):
                assert_close(reference(x, **masks), sharded(x, **masks), "output")
        assert called == ["self_attn", "linear1"] * 2


# --- hooks, parts and copies ---------------------------------------------------------------------------------------


def test_hooks_of_backwards(pool):
    pool.run(_hooked, world=2)


def _hooked() -> None:
    reference, sharded = _twins("TransformerEncoder")
    seen: list[tuple[int, ...]] = []
    if dist.get_rank() == 0:  # on one rank alone
        for layer in sharded.layers:
            layer.self_attn.register_full_backward_hook(lambda m, gi, go: seen.append(tuple(go[0].shape)))
    _beside(reference, sharded, _states(B, L))
    assert dist.get_rank() or seen == [(B, L, E)] * 2


def test_a_layer_of_a_decoder_by_itself(pool):
    pool.run(_part, world=2)


def _part() -> None:
    reference, sharded = _twins("TransformerDecoder")
    tgt, memory = _states(B, L), _states(B, S, seed=1)
    with torch.no_grad():
        wanted, got = (m.layers[0](tgt, memory) for m in (reference, sharded))
    assert_close(wanted, got, "output")
    with pytest.raises(NotSupportedError, match="they enter where the decoder around it is called"):
        sharded.layers[0](tgt, memory)
    wanted, got = (m.layers[0](tgt, memory.detach()) for m in (reference, sharded))
    assert_close(wanted, got, "output")
    for out in (wanted, got):
        out.square().mean().backward()
    assert_same_gradients(reference, sharded)


def test_names_and_copies(pool):
    pool.run(_copied, world=2)


def _copied() -> None:
    reference, sharded = _twins("Transformer")
    again = copy.deepcopy(sharded)
    assert [n for n, _ in again.named_parameters()] == [n for n, _ in reference.named_parameters()]
    for kind in (nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoderLayer, nn.MultiheadAttention):
        assert any(isinstance(m, kind) and type(m).__name__ == kind.__name__ for m in again.modules()), kind
    _beside(reference, again, _states(B, S), _states(B, L, seed=1))
    state = {name: value.clone() for name, value in build("Transformer", heads=H, seed=3).state_dict().items()}
    for m in (reference, again):
        m.zero_grad()
        m.load_state_dict(state)
    _beside(reference, again, _states(B, S), _states(B, L, seed=1))


# --- other precisions, and recomputation ----------------------------------------------------------------------------


@pytest.mark.islands
@pytest.mark.parametrize("auto", [False, True], ids=["bfloat16", "autocast"])
def test_bfloat16(pool, auto):
    pool.run(_bfloat16, auto, world=2)


def _bfloat16(auto: bool) -> None:
    reference = build("Transformer", heads=H).to(torch.float32 if auto else torch.bfloat16)
    sharded = shard_by(PLUGIN, copy.deepcopy(reference))
    states = [_states(B, S).detach(), _states(B, L, seed=1).detach()]
    states = [x.to(torch.float32 if auto else torch.bfloat16) for x in states]
    padding = torch.arange(S) >= torch.tensor([7, 4, 6])[:, None]
    with torch.autocast("cpu", torch.bfloat16, enabled=auto):
        wanted, got = (m(*states, src_key_padding_mask=padding) for m in (reference, sharded))
    assert wanted.dtype == got.dtype
    assert_close(wanted, got, "output", 0.03)
    for out in (wanted, got):
        out.float().square().mean().backward()
    assert {p.grad.dtype for p in sharded.parameters()} == {p.dtype for p in reference.parameters()}
    assert_same_gradients(reference, sharded, 0.05)


@pytest.mark.parametrize("tokens", [False, True], ids=["whole", "split"])
def test_recomputed_layers_draw_the_same_masks(pool, tokens):
    pool.run(_recomputed, tokens, world=2)


def _recomputed(tokens: bool) -> None:
    built = build("Transformer", heads=H, dropout=0.2)
    config = {"gradient_checkpoint_config": shardcore.GradientCheckpointConfig(gradient_checkpointing_ratio=1.0)}
    models = [
        shard_by(PLUGIN, copy.deepcopy(built), tp=2, enable_sequence_parallelism=tokens, **more)
        for more in ({}, config)
    ]
    calls: list[str] = []
    models[1].encoder.layers[0].linear1.register_forward_hook(functools.partial(_note, calls, "linear1"))
    for model in models:
        shardcore.manual_seed(model, 5)
        model(_states(B, S).detach(), _states(B, L, seed=1).detach()).square().mean().backward()
    assert len(calls) == 2
    mine, theirs = (dict(m.named_parameters()) for m in models)
    for name, parameter in mine.items():
        assert_close(parameter.grad.full_tensor(), theirs[name].grad.full_tensor(), name)


# --- what is refused -----------------------------------------------------------------------------------------------


class _Gated(nn.TransformerEncoderLayer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gate = nn.Linear(E, 8)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: build("TransformerEncoderLayer", activation=nn.Softmax(-1)), "computes features from others"),
        (lambda: build("TransformerDecoderLayer", activation=nn.PReLU(37)), "computes features from others"),
        (lambda: build("TransformerEncoderLayer", heads=1), "1 heads cannot be split over 2 ranks: each needs one"),
        (lambda: randomized(_Gated(E, H, 37)), r"gate\.weight"),
    ],
    ids=["softmax", "slopes", "one head", "more"],
)
def test_refusals(model, message):
    made = model()
    config = shardcore.ShardConfig(tensor_parallel_size=2)
    with pytest.raises(PlanError, match=message):
        shardcore.compile_plan(policy_of(PLUGIN, made)(), made, config)
