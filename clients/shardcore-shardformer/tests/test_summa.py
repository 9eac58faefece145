"""``tensor_parallel_mode="2d"``: a square of ranks computes what the whole model does, and what it sends is counted."""

from __future__ import annotations

import copy
import functools
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from square_net import Block, OwnNorm
from tensor_calls import calls_of, numbers
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import shardcore
from shardcore._torch import CAN_TRACE
from shardcore.errors import AgreementError, AlreadyShardedError, ConfigError, NotSupportedError, PlanError
from shardcore_shardformer import Booster, HybridParallelPlugin, ShardConfig, ShardFormer
from shardcore_shardformer.summa.functions import SERVED, Divided
from shardcore_shardformer.tensor.colo import SERVED as OF_COLO_TENSORS
from shardcore_testing.islands import no_float32_islands
from shardcore_testing.observing import Collectives
from shardcore_testing.parity import (
    assert_close,
    assert_gradients_own_storage,
    assert_same_gradients,
    assert_same_parameters,
    whole,
)

DIVIDED = (Shard(0), Shard(1))


class Net(nn.Module):
    def __init__(self, words=12, size=8, out=12, tied=False, recomputes=None):
        super().__init__()
        self.words, self.places = nn.Embedding(words, size, padding_idx=-2), nn.Embedding(6, size)
        self.shift, self.scale = nn.Parameter(torch.randn(1, 6, size)), nn.Parameter(torch.rand(()))
        self.blocks = nn.ModuleList(Block(size, norm) for norm in (nn.LayerNorm, nn.RMSNorm, OwnNorm))
        self.norm, self.head = nn.LayerNorm(size, elementwise_affine=False), nn.Linear(size, out, bias=not tied)
        if tied:
            self.head.weight = self.words.weight
        self.drop, self.recomputes = nn.Dropout(0.1), recomputes
        self.register_buffer("mask", torch.rand(6, 1))

    def forward(self, ids):
        x = self.scale * self.words(ids) + self.shift + self.places(torch.arange(ids.shape[1])) * self.mask
        for block in self.blocks:
            if self.recomputes is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recomputes)
        return self.head(self.drop(self.norm(x)))


def _config(**fields):
    return ShardConfig(tensor_parallel_mode="2d", **fields)


def _divided(model, **fields):
    return ShardFormer(_config(**fields)).shard_model(model)


def _built(**sizes):
    torch.manual_seed(0)
    return Net(**sizes).double().eval()


def _ids(rows, words):
    return torch.randint(0, words, (rows, 6), generator=torch.Generator().manual_seed(rows))


def trained(rows, recomputes=None, steps=1, **sizes):
    plain = _built(**sizes)
    model = _divided(_built(recomputes=recomputes, **sizes), tensor_parallel_size=4)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (plain, model)]
    for step in range(steps):
        ids = _ids(rows, plain.words.num_embeddings - step)
        wanted, got = plain(ids), model(ids)
        assert type(got) is torch.Tensor
        assert_close(wanted, got, "output")
        for out, optimizer in zip((wanted, got), optimizers, strict=True):
            optimizer.zero_grad()
            for _ in range(2):  # gradients add up
                (out.square().mean() + out.sin().sum()).backward(retain_graph=True)
        assert_same_gradients(plain, model)
        assert_gradients_own_storage(model)
        assert all(p.grad.placements == p.placements for p in model.parameters())
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            nn.utils.clip_grad_norm_(each.parameters(), 0.5)
            optimizer.step()
        assert_same_parameters(plain, model)
    return {name: tuple(map(str, p.placements)) for name, p in model.named_parameters()}


def every_training():
    lies = trained(4, steps=3)
    assert lies["blocks.0.up.weight"] == ("S(0)", "S(1)") == lies["words.weight"]
    assert lies["blocks.0.up.bias"] == ("R", "S(0)") == lies["blocks.2.norm.weight"]
    assert (lies["shift"], lies["scale"]) == (("R", "S(2)"), ("R", "R"))
    lies = trained(4, words=11, out=5)  # sizes that two ranks do not divide
    assert lies["words.weight"] == ("R", "S(1)") == lies["head.weight"]
    assert lies["head.bias"] == ("R", "R")
    trained(3)  # nor rows
    trained(1, tied=True)


def every_recomputation():
    trained(4, recomputes=False)
    trained(4, recomputes=True)


@pytest.mark.parametrize("case", [every_training, every_recomputation])
def test_a_square_trains_as_the_whole(case, pool):
    pool.run(case, world=4)


class Attention(nn.Module):
    def __init__(self, kv_heads=2):
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(8, 16), nn.Linear(8, 8 * kv_heads), nn.Linear(16, 8)
        self.near = nn.Parameter(torch.randn(1, 4, 6, 6))

    def forward(self, x, mask):
        q = self.q(x).unflatten(-1, (4, -1)).transpose(1, 2)
        k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in self.kv(x).chunk(2, -1))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=self.near if mask is None else self.near + mask, enable_gqa=True
        )
        return self.out(out.transpose(1, 2).flatten(2))


def attention():
    """A bias of attention is all sequences', a mask each one's own; rows that do not divide are everyone's."""
    for rows, kv_heads, masked in ((4, 2, True), (4, 2, False), (3, 2, False), (4, 1, True)):
        torch.manual_seed(0)
        plain = Attention(kv_heads).double()
        model = _divided(copy.deepcopy(plain))
        inputs = [numbers(rows, 6, 8).requires_grad_() for _ in range(2)]
        mask = numbers(rows, 1, 6, 6, seed=2) if masked else None
        wanted, got = (each(x, mask) for each, x in zip((plain, model), inputs, strict=True))
        assert_close(wanted, got, "output")
        (wanted.sin().sum() + got.sin().sum()).backward()
        assert_same_gradients(plain, model)
        assert_close(inputs[0].grad, inputs[1].grad, "gradient of the input")


def test_attention(pool):
    pool.run(attention, world=4)


def _transformer(name, implementation):
    import transformers

    settings = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 33}
    settings |= {"num_attention_heads": 4, "attn_implementation": implementation}
    if name == "LlamaForCausalLM":
        settings |= {"num_key_value_heads": 2}
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    return cls(cls.config_class(**settings)).double().eval()


def of_transformers(folder):
    """Their classes as they are: heads follow from how features are divided, the loss is the model's own."""
    products = "eager" if CAN_TRACE else "sdpa"  # before torch 2.13 DTensor refuses those of heads
    for name, implementation in (("LlamaForCausalLM", "sdpa"), ("BertForMaskedLM", products)):
        plain, model = _transformer(name, implementation), _divided(_transformer(name, implementation))
        ids = torch.randint(0, 33, (4, 6), generator=torch.Generator().manual_seed(0))
        mask = torch.ones_like(ids)
        mask[1, 4:] = 0
        inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
        inputs |= {"use_cache": False} if "Llama" in name else {}
        wanted, got = plain(**inputs), model(**inputs)
        assert type(wanted) is type(got)
        assert_close(wanted.logits, got.logits, "logits")
        assert_close(wanted.loss, got.loss, "loss")
        wanted.loss.backward()
        got.loss.backward()
        assert_same_gradients(plain, model, 1e-11)
        assert type(model).__name__ == name
        if name == "LlamaForCausalLM":
            wanted, got = (each.generate(ids, max_new_tokens=3, do_sample=False) for each in (plain, model))
            assert torch.equal(wanted, got)
        state = dict(shardcore.full_tensors(model))
        if dist.get_rank() == 0:
            model.save_pretrained(f"{folder}/{name}", state_dict=state)
            assert_same_parameters(plain, type(plain).from_pretrained(f"{folder}/{name}", dtype=torch.float64), 0)


def test_llama_and_bert(pool, tmp_path):
    pytest.importorskip("transformers")
    with no_float32_islands():
        pool.run(of_transformers, str(tmp_path), world=4)


def _sent(model, call):
    """Return the values that a rank sends of each kind in a call and its backward, in an algorithm of least bytes."""
    with Collectives() as forward:
        out = call(model)
    with Collectives() as backward:
        (out.to_local() if isinstance(out, DTensor) else out).sum().backward()
    return [sum(size // 8 // 2 for size in sent.bytes) for sent in (forward, backward)], forward.counts


def bytes_of_a_square():
    tokens, inner, outer, q = 4 * 6, 8, 12, 2
    x = torch.randn(4, 6, inner, dtype=torch.float64, requires_grad=True)
    linear = _divided(nn.Linear(inner, outer, bias=False).double(), parallel_output=True, check_inputs_every=0)
    assert linear(x).placements == (Shard(0), Shard(2))
    sent, kinds = _sent(linear, lambda model: model(x))
    back = tokens * inner // 2 + tokens * inner // 4  # the gradient of x, whole on every rank: along both axes
    share = (q - 1) / q**2
    assert sent == [share * (inner * outer + tokens * outer), share * (2 * inner * outer + tokens * outer) + back]
    assert kinds == {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1}
    table = _divided(nn.Embedding(10, inner).double(), parallel_output=True, check_inputs_every=0)
    sent, kinds = _sent(table, lambda model: model(_ids(4, 10)))
    assert sent == [share * tokens * inner] * 2
    assert kinds == {"reduce_scatter_tensor": 1}


def test_what_a_square_sends(pool):
    pool.run(bytes_of_a_square, world=4)


_MORE = {
    "__getitem__": (lambda t: t[:, 1:], lambda t: t[1], lambda t: t[:, None]),
    "cat": (lambda t: torch.cat([t, t.sin()], 0), lambda t: torch.cat([t, t.sin()], 1)),
    "chunk": (lambda t: t.chunk(2, 0)[1], lambda t: t.chunk(3, 1)[0]),
    "expand": lambda t: t.unsqueeze(1).expand(4, 3, 4),
    "flatten": lambda t: t.unsqueeze(1).flatten(0, 1),
    "reshape": (lambda t: t.reshape(4, 2, 2), lambda t: t.reshape(2, 2, 4)),
    "split": (lambda t: t.split(2, 0)[1], lambda t: t.split([1, 3], 1)[1]),
    "squeeze": lambda t: t.unsqueeze(1).squeeze(1),
    "stack": (lambda t: torch.stack([t, t.sin()]), lambda t: torch.stack([t, t.sin()], -1)),
    "type_as": lambda t: t.type_as(torch.ones(1)),
    "unflatten": (lambda t: t.unflatten(-1, (2, 2)), lambda t: t.unflatten(0, (2, -1))),
    "view": lambda t: t.view(4, 2, 2).transpose(1, 2),
}


def served():
    """Every function that is served, of a matrix that is divided in each way: value and gradient are the whole's."""
    mesh = init_device_mesh("cpu", (2, 2))
    values = numbers(4, 4).abs() + 0.5
    ways = [DIVIDED, (Shard(1), Shard(0)), (Shard(0), Replicate()), (Replicate(), Shard(1))]
    for name, lies in itertools.product(sorted(SERVED | _MORE.keys()), ways):
        if name == "ne" and not CAN_TRACE:
            continue  # an error of DTensor's before torch 2.13
        calls = _MORE[name] if name in _MORE else calls_of(name)
        for call in calls if isinstance(calls, tuple) else (calls,):
            plain = values.clone().requires_grad_()
            leaf = distribute_tensor(values, mesh, lies).requires_grad_()
            wanted = call(plain)
            with Divided(lambda: "a test"):
                got = call(leaf)
            if not isinstance(wanted, torch.Tensor):
                assert got == wanted, (name, lies)
                continue
            torch.testing.assert_close(whole(got), wanted, msg=f"{name} {lies}")
            if not wanted.requires_grad:
                continue
            factors = numbers(*wanted.shape, seed=1).to(wanted.dtype)
            (wanted * factors).sum().backward()
            (whole(got) * factors).sum().backward()
            assert leaf.grad.placements == lies
            torch.testing.assert_close(leaf.grad.full_tensor(), plain.grad, msg=f"gradient of {name} {lies}")


@pytest.mark.nightly
def test_every_function_that_is_served(pool):
    assert _MORE.keys() == (SERVED - OF_COLO_TENSORS) | {"cat", "chunk", "split", "stack"}
    pool.run(served, world=4)


class Strange(nn.Module):
    """Does one thing with what a linear returns."""

    def __init__(self, call):
        super().__init__()
        self.linear, self.call = nn.Linear(4, 6), call

    def forward(self, x):
        return self.call(self.linear(x))


def refusals():
    shapes = {
        r"self_attn: a MultiheadAttention is not served": nn.TransformerEncoderLayer(8, 2, 16),
        r"0: a Conv1d is not served": nn.Sequential(nn.Conv1d(4, 4, 1)),
        r"1: a BatchNorm1d is not served": nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
        r"none of its 1 matrices has two sizes that 2 divides: \[\(4, 3\)\]": nn.Linear(3, 4),
        r"its parameters are on meta": nn.Linear(4, 4, device="meta"),
    }
    for said, model in shapes.items():
        kept = dict(model.named_parameters())
        with pytest.raises(PlanError, match=said):
            _divided(model)
        assert all(kept[name] is parameter for name, parameter in model.named_parameters())
    x = torch.randn(4, 4)
    for said, call in {
        r"cumsum in the model \(Strange\) is not served": lambda y: y.cumsum(0),
        r"addmm in the model \(Strange\) is not served": lambda y: torch.addmm(y, y, y),
        r"relu in place in the model": lambda y: F.relu(y, True),
        r"__iadd__ in the model|add_ in the model": lambda y: y.add_(1),
        r"dropout \(p=0.5; call model.eval\(\), or set it to 0\) in the model": lambda y: F.dropout(y, 0.5),
        r"a linear of a single vector in the model": lambda y: F.linear(y[0], y),
        r"a norm over several dims": lambda y: F.layer_norm(y, (4, 6)),
    }.items():
        with pytest.raises(NotSupportedError, match=said):
            _divided(Strange(call))(x)
    with pytest.raises(RuntimeError, match=r"evenly divisible|redistribution") as caught:
        _divided(Strange(lambda y: y.unflatten(-1, (3, 2))))(x)
    assert "tensor_parallel_mode='2d': this is unflatten in the model" in caught.value.__notes__[-1]
    linear = _divided(nn.Linear(4, 6))
    with pytest.raises(NotSupportedError, match=r"autocast \(cast the model"), torch.autocast("cpu", torch.bfloat16):
        linear(x)
    with pytest.raises(IndexError):
        _divided(nn.Embedding(4, 4))(torch.tensor([[4]]))
    with pytest.raises(AlreadyShardedError):
        _divided(linear)
    with pytest.raises(AgreementError, match="tensor 0 of the inputs"):
        linear(x + dist.get_rank())
    with pytest.raises(AgreementError, match="the values of weight"):
        _divided(_of_rank(nn.Linear(4, 4)))
    for name in ("policy", "optimizer"):
        with pytest.raises(NotSupportedError, match=rf"shard_model\({name}=\)"):
            ShardFormer(_config()).shard_model(nn.Linear(4, 4), **{name: object()})
    booster = Booster(plugin=HybridParallelPlugin(tp_size=4, tensor_parallel_mode="2d"))
    for shard in (functools.partial(shardcore.shard, config=_config()), booster.boost):
        with pytest.raises(NotSupportedError, match=r"is not for shardcore\.shard, nor for Booster"):
            shard(nn.Linear(4, 4))


def _of_rank(module):
    with torch.no_grad():
        module.weight += dist.get_rank()
    return module


def test_refusals(pool):
    pool.run(refusals, world=4)


def two_ranks():
    with pytest.raises(ConfigError, match="wants a square of ranks, 4, 9 or 16, got 2"):
        _divided(nn.Linear(4, 4))


def test_a_number_of_ranks_that_is_no_square(pool):
    pool.run(two_ranks)
    with pytest.raises(ConfigError, match="wants a square of ranks, 4, 9 or 16, got 1"):
        _divided(nn.Linear(4, 4))


def states(folder):
    plain, model = _built(), _divided(_built())
    weight = model.head.weight.to_local()
    assert weight.untyped_storage().nbytes() == weight.nbytes == plain.head.weight.nbytes // 4
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert full.keys() == plain.state_dict().keys()
    assert all(torch.equal(full[name], value) for name, value in plain.state_dict().items())
    dcp.save(model.state_dict(), checkpoint_id=folder)
    for other in (_divided(Net().double().eval()), _divided(Net().double().eval())):
        before = other(_ids(4, 12))
        if folder:
            state = other.state_dict()
            dcp.load(state, checkpoint_id=folder)
            other.load_state_dict(state)
            folder = None
        else:
            set_model_state_dict(other, full, options=StateDictOptions(full_state_dict=True))
        assert not torch.equal(before, other(_ids(4, 12)))
        assert_same_parameters(plain, other, 0)
        assert_close(plain(_ids(4, 12)), copy.deepcopy(other)(_ids(4, 12)), "output")


def test_states(pool, tmp_path):
    pool.run(states, str(tmp_path), world=4)
