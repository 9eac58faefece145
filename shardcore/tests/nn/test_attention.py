"""`torch.nn.MultiheadAttention` by itself: every way to make and to call it, on even and on uneven heads."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from needs import FUSED
from torch import Tensor, nn

import shardcore
from shardcore.errors import NotSupportedError, PlanError, WrapError
from shardcore.nn.attention import SplitAttention
from shardcore.policy import Policy
from shardcore.styles import attention
from shardcore_testing import no_float32_islands, randomized
from shardcore_testing.observing import Collectives, Draws, Replay
from shardcore_testing.parity import assert_close, assert_same_gradients, equal_on_ranks

# torch's own module warns of masks of two types, and of nested tensors.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Support for mismatched:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
]
B, L, S, E, H = 3, 5, 7, 48, 4


class _Any(Policy):
    def module_policy(self) -> Any:
        return {"MultiheadAttention": [attention("")]}


class _Self(Policy):
    def module_policy(self) -> Any:
        return {"MultiheadAttention": [attention("", of="self")]}


class _Memory(Policy):
    def module_policy(self) -> Any:
        return {"MultiheadAttention": [attention("", of="memory")]}


def _build(**options: Any) -> Any:
    return randomized(nn.MultiheadAttention(E, H, **{"batch_first": True, **options}))


def _shard(module: nn.Module, policy: type[Policy] = _Any) -> Any:
    return shardcore.shard(copy.deepcopy(module), policy=policy, tp=dist.get_world_size())


#: 4 heads: 2 ranks divide them, each with a part of one weight; 3 ranks do not.
EVEN_OR_NOT = pytest.mark.parametrize("world", [pytest.param(2, marks=FUSED), 3])


@pytest.fixture(autouse=True)
def _float64_throughout() -> Iterator[None]:
    with no_float32_islands():
        yield


#: What it is made with.
MADE: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "keys added": {"add_bias_kv": True, "add_zero_attn": True},
    "keys added, no bias": {"add_bias_kv": True, "bias": False},
    "apart": {"kdim": 20, "vdim": 28},
    "apart, no bias, keys added": {"kdim": 20, "vdim": 28, "bias": False, "add_bias_kv": True, "add_zero_attn": True},
}
#: Masks, by what makes them of a generator and of the leading sizes (B, H), which are None without a batch.
MASKS = ("none", "bools", "floats", "bools of heads", "floats of heads", "causal", "hinted")
PADDING = ("none", "bools", "floats")
SHAPES = ("rows first", "rows second", "no rows")


def _mask(kind: str, generator: torch.Generator, rows: int) -> dict[str, Any]:
    if kind == "none":
        return {}
    if kind in ("causal", "hinted"):
        return {"attn_mask": torch.ones(L, S, dtype=torch.bool).triu(1), "is_causal": kind == "hinted"}
    shape = (rows * H, L, S) if "heads" in kind else (L, S)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
    if kind.startswith("bools"):
        drawn[..., 0] = -1  # every query attends to something
        return {"attn_mask": drawn > 0.5}
    return {"attn_mask": drawn.requires_grad_()}


def _padding(kind: str, generator: torch.Generator, rows: int, batched: bool) -> dict[str, Any]:
    if kind == "none":
        return {}
    drawn = torch.randn(rows, S, generator=generator, dtype=torch.float64)
    drawn[:, 0] = -1
    found = drawn > 0.5 if kind == "bools" else drawn
    found = found if batched else found[0]
    return {"key_padding_mask": found if kind == "bools" else found.clone().requires_grad_()}


def _call(module: Any, shape: str, mask: str, padding: str, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    rows = 1 if shape == "no rows" else B
    sizes = {"query": (L, E), "key": (S, module.kdim), "value": (S, module.vdim)}
    states = {n: torch.randn(rows, *size, generator=generator, dtype=torch.float64) for n, size in sizes.items()}
    if shape != "rows first":
        states = {n: x.transpose(0, 1) if shape == "rows second" else x[0] for n, x in states.items()}
    states = {n: x.clone().requires_grad_() for n, x in states.items()}
    batched = shape != "no rows"
    return {**states, **_mask(mask, generator, rows), **_padding(padding, generator, rows, batched)}


def _ways() -> Iterator[tuple[str, str, str, str, dict[str, Any]]]:
    """Yield what it is made with and how it is called: all pairs of each, not all combinations."""
    weights = ({"need_weights": False}, {"need_weights": True}, {"need_weights": True, "average_attn_weights": False})
    yield from itertools.product(MADE, ("rows first",), ("floats of heads",), ("floats",), weights)
    yield from itertools.product(("plain", "keys added"), SHAPES, ("none", "bools of heads"), ("bools",), weights[:2])
    yield from itertools.product(("plain", "apart, no bias, keys added"), SHAPES[1:2], MASKS, PADDING, weights[:1])
    yield from itertools.product(("keys added",), SHAPES[:1], MASKS, PADDING, weights[2:])


def _weighted(*tensors: Tensor | None) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    given = [t for t in tensors if t is not None]
    return torch.stack([(t * torch.randn(t.shape, generator=generator, dtype=t.dtype)).mean() for t in given]).sum()


def _beside(reference: Any, sharded: Any, call: dict[str, Any], *, gradients: bool = True, **more: Any) -> None:
    """Compare outputs, attention weights and the gradients of parameters, states and masks."""
    calls = [{n: _copy(x) for n, x in call.items()} for _ in range(2)]
    outs = [m(**given, **more) for m, given in zip((reference, sharded), calls, strict=True)]
    assert (outs[0][1] is None) == (outs[1][1] is None)
    for name, wanted, got in zip(("output", "weights"), *outs, strict=True):
        if wanted is not None:
            assert_close(wanted, got, name)
            assert equal_on_ranks(got)
    if not gradients:
        return
    for out in outs:
        _weighted(*out).backward()
    for name, wanted in calls[0].items():
        if isinstance(wanted, Tensor) and wanted.requires_grad:
            assert (wanted.grad is None) == (calls[1][name].grad is None), name
            if wanted.grad is not None:
                assert_close(wanted.grad, calls[1][name].grad, f"gradient of {name}")
                assert wanted.grad.abs().max() > 0
    assert_same_gradients(reference, sharded)


def _copy(value: Any) -> Any:
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


@pytest.mark.nightly
@EVEN_OR_NOT
def test_every_way_to_call_it(pool, world):
    pool.run(_every_way, world=world)


def _every_way() -> None:
    for made, shape, mask, padding, more in _ways():
        try:
            reference = _build(**MADE[made], batch_first=shape == "rows first")
            sharded = _shard(reference)
            for seed in (0, 1):  # gradients add up
                _beside(reference, sharded, _call(reference, shape, mask, padding, seed), **more)
        except Exception as error:
            error.add_note(f"{made}, {shape}, mask {mask}, padding {padding}, {more}")
            raise


@EVEN_OR_NOT
def test_what_it_attends_to(pool, world):
    pool.run(_attends, world=world)


def _attends() -> None:
    for policy, made in ((_Self, "plain"), (_Memory, "plain"), (_Memory, "no bias"), (None, "plain")):
        reference = _build(**MADE[made])
        given = {"policy": policy} if policy else {"policy": _Any}
        sharded = shardcore.shard(copy.deepcopy(reference), tp=dist.get_world_size(), **given)
        counts = []
        for _ in range(2):
            states = torch.randn(2, B, L, E, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            gradients = []
            for model in (reference, sharded):
                query, other = (x.clone().requires_grad_() for x in states)
                memory = other if policy is _Memory else query
                out, weights = model(query, memory, memory)
                with Collectives() as sent:
                    _weighted(out, weights).backward()
                counts.append(sent.counts["allreduce"])
                gradients.append([x.grad for x in (query, other) if x.grad is not None])
            for wanted, got in zip(*gradients, strict=True):
                assert_close(wanted, got, "gradient of states")
        assert_same_gradients(reference, sharded)
        # Each that enters, and once the biases.
        assert counts[-1] == {_Self: 1, _Memory: 2, None: 3}[policy] + (made == "plain"), counts


@FUSED
def test_fast_paths_of_torch_compute_the_same(pool):
    pool.run(_fast, world=2)


def _fast() -> None:
    reference = _build().eval()
    sharded = _shard(reference)
    x = torch.randn(B, S, E, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    padding = torch.arange(S) >= torch.tensor([7, 4, 6])[:, None]
    bools = torch.ones(S, S, dtype=torch.bool).triu(1)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            for more in (
                {},
                {"key_padding_mask": padding},
                {"attn_mask": bools, "key_padding_mask": padding},
                {"attn_mask": bools, "is_causal": True, "need_weights": False},
                {"attn_mask": bools.expand(B * H, S, S), "average_attn_weights": False},
            ):
                wanted, got = (m(x, x, x, **more) for m in (reference, sharded))
                for mine, theirs in zip(wanted, got, strict=True):
                    assert (mine is None) == (theirs is None)
                    if mine is not None:
                        assert_close(mine, theirs, "output")


@EVEN_OR_NOT
def test_dropout_of_attention(pool, world):
    pool.run(_dropout, world=world)


def _dropout() -> None:
    torch.manual_seed(100 + dist.get_rank())
    reference = _build(dropout=0.3)
    sharded = _shard(reference)
    for need_weights in (False, True):
        call = {**_call(reference, "rows first", "floats", "bools"), "need_weights": need_weights}
        shardcore.manual_seed(sharded, 3)
        users = torch.get_rng_state()
        with Draws() as draws:
            got = sharded(**call)
        assert torch.equal(users, torch.get_rng_state())
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, draws.drawn)
        assert {len(of_rank) for of_rank in parts} == {1}
        # Each rank drew for its heads (B, h, L, S); torch draws for (B, H, L, S), or for (B * H, L, S).
        masks = [of_rank[0].unflatten(0, (B, -1)) if of_rank[0].ndim == 3 else of_rank[0] for of_rank in parts]
        assert len({tuple(mask.flatten()[:60].tolist()) for mask in masks}) == len(masks)  # H6
        whole = torch.cat(masks, 1)
        with Replay([[whole.flatten(0, 1) if need_weights else whole]]) as replay:
            wanted = reference(**call)
        assert not replay.problems
        assert replay.used == 1
        for mine, theirs in zip(wanted, got, strict=True):
            if mine is not None:
                assert_close(mine, theirs, "output")
        for out in (wanted, got):
            _weighted(*out).backward()
        assert_same_gradients(reference, sharded)
    sharded.eval()
    assert_close(reference.eval()(**call)[0], sharded(**call)[0], "without dropout")


# --- what is refused -----------------------------------------------------------------------------------------------


@FUSED
def test_refusals_of_calls(pool):
    pool.run(_refused, world=2)


def _refused() -> None:
    module = _build().eval()
    x, y = torch.randn(2, B, L, E, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model = _shard(module)
    with pytest.raises(RuntimeError, match="pass the mask too"):
        model(x, x, x, is_causal=True)
    with pytest.raises(RuntimeError, match=re.escape("wanted (5, 5) or (12, 5, 5), which is batch * all heads")):
        model(x, x, x, attn_mask=torch.zeros(6, 5, 5))
    with pytest.raises(RuntimeError, match=r"key_padding_mask has the shape \(5,\)"):
        model(x, x, x, key_padding_mask=torch.zeros(5))
    with pytest.raises(RuntimeError, match=r"bool or floating, not torch\.int64"):
        model(x, x, x, key_padding_mask=torch.zeros(B, L, dtype=torch.int64))
    with pytest.raises(WrapError, match="functional_call with whole tensors"):
        torch.func.functional_call(model, {"in_proj_weight": module.in_proj_weight}, (x, x, x))
    nested = torch.nested.nested_tensor(list(x), layout=torch.jagged)
    with pytest.raises(NotSupportedError, match="nested tensors are not split over ranks"):
        model(nested, nested, nested)
    alone = shardcore.shard(copy.deepcopy(module), tp=2, policy=_Self)
    with pytest.raises(NotSupportedError, match=r'its key and its query are two tensors.*of="self"'):
        alone(x, y, y)
    alone(x, x.view_as(x), x)  # as hooks make it
    memory = shardcore.shard(copy.deepcopy(module), tp=2, policy=_Memory)
    with pytest.raises(NotSupportedError, match=r'its value and its key are two tensors.*of="memory"'):
        memory(x, y, x)


class _Own(nn.MultiheadAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize(
    ("model", "ranks", "message"),
    [
        (lambda: nn.MultiheadAttention(E, 3), 4, r"3 heads cannot be split over 4 ranks: each needs one"),
        (lambda: _Own(E, 4), 2, "_Own computes something else than torch.nn.MultiheadAttention"),
    ],
    ids=["heads", "forward"],
)
def test_refusals_of_plans(model, ranks, message):
    made = model()
    config = shardcore.ShardConfig(tensor_parallel_size=ranks)
    with pytest.raises(PlanError, match=message) as caught:
        shardcore.compile_plan(_Any(), made, config)
    assert len(caught.value.problems) == 1


def test_other_widths_cannot_be_of_one_tensor():
    module = nn.MultiheadAttention(E, H, kdim=20)
    with pytest.raises(PlanError, match="a width of their own"):
        shardcore.compile_plan(_Self(), module, shardcore.ShardConfig(tensor_parallel_size=2))


# --- alone ---------------------------------------------------------------------------------------------------------


@EVEN_OR_NOT
def test_from_native_module(pool, world):
    pool.run(_alone, world=world)


def _alone() -> None:
    for made in ("plain", "apart"):
        reference = _build(**MADE[made])
        sharded = copy.deepcopy(reference)
        assert SplitAttention.from_native_module(sharded) is sharded
        assert isinstance(sharded, nn.MultiheadAttention)
        _beside(reference, sharded, _call(reference, "rows first", "floats", "bools"))
        state = sharded.state_dict()
        assert list(state) == list(reference.state_dict())
        for name, wanted in reference.state_dict().items():
            assert_close(wanted, state[name], name)
