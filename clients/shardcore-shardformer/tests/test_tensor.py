"""ColoTensor: parts compute as the whole does, in every division, and what would not is refused."""

from __future__ import annotations

import copy
import itertools
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tensor_calls import OTHER, calls_of, numbers
from torch import nn

from shardcore._torch import CAN_TRACE
from shardcore.errors import ConfigError, NotSupportedError
from shardcore_shardformer import tensor
from shardcore_shardformer.tensor import (
    ColoParameter,
    ColoTensor,
    ColoTensorSpec,
    ComputePattern,
    ComputeSpec,
    ProcessGroup,
    ReplicaSpec,
    ShardSpec,
    launch,
    print_rank_0,
)
from shardcore_shardformer.tensor.colo import SERVED, SERVED_IN_PLACE

DOCS = Path(__file__).parents[3] / "docs" / "compat.md"


def _part(whole, dist_spec, group):
    if isinstance(dist_spec, ReplicaSpec):
        return whole.clone()
    return whole.chunk(group.tp_world_size(), dist_spec.dims[0])[group.tp_local_rank()].clone()


def _specs(group, *dims):
    return [ReplicaSpec(), *(ShardSpec([dim], [group.tp_world_size()]) for dim in dims)]


def _parameter(whole, dist_spec, group, compute=None):
    return ColoParameter(_part(whole, dist_spec, group), spec=ColoTensorSpec(group, dist_spec, compute))


def every_pair(*shape):
    group = ProcessGroup(tp_degree=2)
    whole, factors = numbers(*shape), numbers(*shape, seed=1)
    wanted = 2 * whole * factors
    for before, after in itertools.product(_specs(group, *range(len(shape))), repeat=2):
        # what autograd has recorded
        part = _part(whole, before, group).requires_grad_()
        tensor = ColoTensor.from_torch_tensor(part, ColoTensorSpec(group, before))
        earlier = (tensor.pow(2) * factors).sum()
        tensor.set_dist_spec(after)
        assert torch.equal(tensor.data, _part(whole, after, group))
        assert (tensor.dist_spec, tensor.size()) == (after, whole.shape)
        loss = (tensor.pow(2) * factors).sum()
        (earlier + 2 * loss).backward()
        torch.testing.assert_close(loss.data, (whole.pow(2) * factors).sum())
        torch.testing.assert_close(part.grad, _part(3 * wanted, before, group))
        # a leaf, which stays one
        leaf = _parameter(whole, before, group)
        for _ in range(2):
            leaf.set_dist_spec(after)
            (leaf.redistribute(before).pow(2) * factors).sum().backward()
            assert leaf.grad.dist_spec == after
            leaf.set_dist_spec(before)
        torch.testing.assert_close(leaf.grad.data, _part(2 * wanted, before, group))
        torch.testing.assert_close(leaf.grad.to_replicate().data, 2 * wanted)
        assert leaf.is_leaf
        assert isinstance(leaf, nn.Parameter)


def _converted(layer, dist_spec, group, keeps=False):
    compute = ComputeSpec(ComputePattern.TP1D)
    compute.set_output_replicate(not keeps)
    weight = _parameter(layer.weight.data, dist_spec, group, compute)
    made = copy.deepcopy(layer)
    made.weight = weight
    if getattr(layer, "bias", None) is not None:
        follows = isinstance(dist_spec, ShardSpec) and dist_spec.dims[0] == 0
        made.bias = _parameter(layer.bias.data, dist_spec if follows else ReplicaSpec(), group)
    return made


def _layers():
    torch.manual_seed(0)
    ids = torch.tensor([[0, 3, 7], [2, 3, 5]])
    for bias, x in itertools.product((True, False), (numbers(3, 4), numbers(2, 3, 4))):
        yield nn.Linear(4, 6, bias=bias, dtype=torch.float64), x
    for options in ({}, {"padding_idx": 5}, {"padding_idx": 2}, {"scale_grad_by_freq": True}):
        yield nn.Embedding(8, 4, dtype=torch.float64, **options), ids


def layers():
    group = ProcessGroup(tp_degree=2)
    for (layer, x), dist_spec, keeps in itertools.product(_layers(), _specs(group, 0, -1), (False, True)):
        own = _converted(layer, dist_spec, group, keeps)
        inputs = [x.clone().requires_grad_(x.is_floating_point()) for _ in range(2)]
        wanted, got = layer(inputs[0]), own(inputs[1])
        assert got.is_replicate() or keeps
        torch.testing.assert_close(got.to_replicate().data, wanted)
        factors = numbers(*wanted.shape, seed=3)
        layer.zero_grad()
        (wanted * factors).sum().backward()
        (got * factors).sum().backward()
        if x.is_floating_point():
            torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
        for mine, whole in zip(own.parameters(), layer.parameters(), strict=True):
            assert mine.grad.dist_spec == mine.dist_spec
            torch.testing.assert_close(mine.grad.to_replicate().data, whole.grad)


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 8)).double()


def training():
    group = ProcessGroup(tp_degree=2)
    row, column = ShardSpec([1], [2]), ShardSpec([0], [2])
    plain, model = _model(), _model()
    model[0] = _converted(model[0], column, group)
    model[1] = _converted(model[1], column, group, keeps=True)
    model[3] = _converted(model[3], row, group)
    ids, labels = torch.arange(8).view(2, 4), torch.arange(8).flip(0)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (plain, model)]
    assert model[2](model[1](model[0](ids))).dist_spec == ShardSpec([2], [2])  # nothing is gathered between a pair
    for _ in range(3):
        losses = []
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            loss = F.cross_entropy(each(ids).flatten(0, 1), labels)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(each.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.item())
        assert losses[1] == pytest.approx(losses[0], abs=1e-12)
    for mine, whole in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.to_replicate().data, whole.data)
    state = optimizers[1].state[model[3].weight]["exp_avg"]
    assert (state.dist_spec, tuple(state.shape), tuple(state.size_global())) == (row, (8, 4), (8, 8))


def _whole(value):
    return value.to_replicate().data if isinstance(value, ColoTensor) else value


def served():
    """Every operation that is served, of a tensor divided in either way: values and gradients."""
    group = ProcessGroup(tp_degree=2)
    values = numbers(4, 4).abs() + 0.5
    leaves = [_parameter(values, dist_spec, group) for dist_spec in _specs(group, 0, 1)[1:]]
    for name, leaf in itertools.product(sorted(SERVED), leaves):
        for call in calls_of(name):
            plain = values.clone().requires_grad_()
            leaf.grad = None
            wanted, got = call(plain), call(leaf)
            if not isinstance(wanted, torch.Tensor):
                assert got == wanted, (name, leaf.dist_spec)
                continue
            torch.testing.assert_close(_whole(got), wanted, msg=f"{name} {leaf.dist_spec}")
            if wanted.requires_grad:
                factors = torch.rand(wanted.shape, generator=torch.Generator().manual_seed(5)).to(wanted.dtype)
                (wanted * factors).sum().backward()
                (got * factors).sum().backward()
                torch.testing.assert_close(_whole(leaf.grad), plain.grad, msg=f"gradient: {name} {leaf.dist_spec}")


#: What is served in place -> its arguments.
_IN_PLACE = {
    "lerp_": (OTHER, 0.3),
    "addcmul_": (OTHER, OTHER),
    "addcdiv_": (OTHER, OTHER),
    "fill_": (2.0,),
    "clamp_": (0.7,),
    **dict.fromkeys(("add_", "sub_", "mul_", "div_", "copy_"), (OTHER,)),
}


def served_in_place():
    group = ProcessGroup(tp_degree=2)
    values = numbers(4, 4).abs() + 0.5
    for name, dist_spec in itertools.product(sorted(SERVED_IN_PLACE), _specs(group, 0, 1)[1:]):
        plain, tensor = values.clone(), _parameter(values, dist_spec, group)
        with torch.no_grad():
            if name.startswith("_foreach"):
                getattr(torch, name)([plain], 0.5)
                getattr(torch, name)([tensor], 0.5)
            else:
                getattr(plain, name)(*_IN_PLACE.get(name, ()))
                assert getattr(tensor, name)(*_IN_PLACE.get(name, ())) is tensor
        assert tensor.dist_spec == dist_spec
        torch.testing.assert_close(_whole(tensor), plain, msg=f"{name} {dist_spec}")


def refusals():
    group = ProcessGroup(tp_degree=2)
    divided, whole = (
        ColoTensor(numbers(2, 4), ColoTensorSpec(group, spec)) for spec in (ShardSpec([0], [2]), ReplicaSpec())
    )
    leaf = _parameter(numbers(4, 4), ShardSpec([0], [2]), group)
    computed, kept = leaf * 2, leaf * 2
    kept.retain_grad()
    other = ProcessGroup(dp_degree=2)
    for said, call in {
        "tolist is not served on a divided .* call t.to_replicate": divided.tolist,
        "^view is": lambda: divided.view(2, 4),
        "getitem__ is": lambda: divided[0],
        "^setitem__ is|^__setitem__ is": lambda: divided.__setitem__(0, 1.0),
        "^dropout is": lambda: F.dropout(divided),
        "^mse_loss is": lambda: F.mse_loss(divided, torch.ones(4, 4)),
        "^amin is": divided.amin,
        "^cross_entropy is": lambda: F.cross_entropy(divided, torch.arange(4)),
        "^H is": lambda: divided.H,
        "^gather is": lambda: divided.gather(0, torch.zeros(1, 4, dtype=torch.long)),
        "add of a divided ColoTensor into": lambda: torch.add(divided, 1, out=torch.empty(4, 4)),
        "relu of a divided ColoTensor into": lambda: F.relu(computed, inplace=True),
        "add_ in place": lambda: computed.add_(1),
        "mul_ in place": lambda: divided.mul_(torch.ones(4, 4, dtype=torch.float64, requires_grad=True)),
        "is not saved with": lambda: pickle.dumps(whole),
        "copy t.detach": lambda: copy.deepcopy(computed),
        "call retain_grad.. behind it": lambda: kept.set_dist_spec(ReplicaSpec()),
    }.items():
        with pytest.raises(NotSupportedError, match=said):
            call()
    for said, call in {
        "of several process groups": lambda: whole + ColoTensor(numbers(2, 4), ColoTensorSpec(other)),
        "no dimension 2": lambda: whole.set_dist_spec(ShardSpec([2], [2])),
        "no dimension -3": lambda: ColoTensor(numbers(2, 4), ColoTensorSpec(group, ShardSpec([-3], [2]))),
        "3 is no multiple of 2": lambda: ColoTensor(numbers(3), ColoTensorSpec(group)).redistribute(
            ShardSpec([0], [2])
        ),
        "as a plain tensor, got ColoTensor": lambda: ColoParameter(whole, spec=ColoTensorSpec(group)),
        "as a plain tensor, got list": lambda: ColoTensor([1.0], ColoTensorSpec(group)),
        "on meta; ranks meet on cpu": lambda: ColoTensor(torch.empty(2, device="meta"), ColoTensorSpec(group)),
        "wanted a ColoTensorSpec": lambda: ColoTensor(numbers(2), group),
        "dist_attr=.* wanted": lambda: ColoTensorSpec(group, "replica"),
        r"wanted num_partitions=\[2\]": lambda: ColoTensorSpec(group, ShardSpec([0], [4])),
        "wanted tp . dp = 2": lambda: ProcessGroup(tp_degree=2, dp_degree=2),
        "wanted positive integers": lambda: ProcessGroup(tp_degree=0),
    }.items():
        with pytest.raises(ConfigError, match=said):
            call()


def late_gradients():
    """A leaf that is divided anew between forward and backward gets no sum of parts of two divisions."""
    group = ProcessGroup(tp_degree=2)
    for before, after in itertools.permutations(_specs(group, 0, 1), 2):
        leaf = _parameter(numbers(4, 4), before, group)
        for _ in range(2):
            loss = leaf.pow(2).sum()
            leaf.set_dist_spec(after)
            with pytest.raises(NotSupportedError, match="as it was divided before set_dist_spec"):
                loss.backward()
            del loss
            leaf.set_dist_spec(before)
        leaf.pow(2).sum().backward()
        torch.testing.assert_close(leaf.grad.to_replicate().data, 2 * numbers(4, 4))
        # what has no gradient is for an earlier forward what it was there
        constant = ColoTensor(_part(numbers(2, 2), before, group), ColoTensorSpec(group, before))
        factor = numbers(2, 2).requires_grad_()
        product = (constant * factor).sum()
        constant.set_dist_spec(after)
        product.backward()
        torch.testing.assert_close(factor.grad, numbers(2, 2))


def other_uses():
    group = ProcessGroup(tp_degree=2)
    leaf = _parameter(numbers(4, 4), ShardSpec([0], [2]), group)
    copied = copy.deepcopy({"a": leaf, "b": leaf})
    assert copied["a"] is copied["b"] is not leaf
    assert isinstance(copied["a"], ColoParameter)
    assert (copied["a"].dist_spec, copied["a"].requires_grad) == (leaf.dist_spec, True)
    assert (leaf.shape, leaf.size(), leaf.numel(), leaf.T.dist_spec) == ((2, 4), (4, 4), 16, ShardSpec([1], [2]))
    assert "ShardSpec" in repr(leaf)
    leaf.set_dist_spec(ShardSpec([-1], [2]))
    assert leaf.dist_spec == ShardSpec([1], [2])
    leaf.set_dist_spec(ShardSpec([-2], [2]))
    with torch.no_grad():
        before = leaf.data.clone()
        assert leaf.mul_(2) is leaf
    assert torch.equal(leaf.data, 2 * before)
    whole = ColoTensor(numbers(2, 4), ColoTensorSpec(group)).requires_grad_()
    first = (whole * 2).view(4, 2)[0]  # of what every rank has all is served
    first.add_(1)
    assert isinstance(first, ColoTensor)
    first.sum().backward()
    assert whole.grad.tolist() == [[2.0, 2.0, 0.0, 0.0], [0.0] * 4]
    assert leaf.sum().item() == pytest.approx(2 * numbers(4, 4).sum().item())
    assert group == ProcessGroup(dp_degree=1)
    assert ProcessGroup().dp_world_size() == 2


def test_every_pair_of_divisions(pool):
    pool.run(every_pair, 4, 2)


_OF_DTENSOR = pytest.mark.skipif(not CAN_TRACE, reason="DTensor lacks some of these operations before torch 2.13")
_CASES = [served_in_place, layers, training, refusals, late_gradients, other_uses]


@pytest.mark.parametrize("case", [pytest.param(served, marks=_OF_DTENSOR), *_CASES])
def test_on_two_ranks(case, pool):
    pool.run(case)


def layout():
    group = ProcessGroup(tp_degree=2, dp_degree=2)
    rank = dist.get_rank()
    assert dist.get_process_group_ranks(group.tp_process_group()) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert dist.get_process_group_ranks(group.dp_process_group()) == [rank % 2, rank % 2 + 2]
    assert (group.tp_local_rank(), group.dp_local_rank()) == (rank % 2, rank // 2)
    every_pair(4, 2, 6)


def test_replicas(pool):
    pool.run(layout, world=4)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: ShardSpec([0, 1], [2, 2]), NotSupportedError, "along one dimension"),
        (lambda: ShardSpec(0, [2]), ConfigError, "one integer in a list"),
        (lambda: ShardSpec([0], [0]), ConfigError, "at least one part"),
        (lambda: ComputeSpec(ComputePattern.TP2D), NotSupportedError, "use ComputePattern.TP1D"),
        (
            lambda: launch({"zero": 1}, rank=0, world_size=1, host="a", port=1),
            ConfigError,
            r"launch\(config=\) got zero",
        ),
        (ProcessGroup, ConfigError, r"call launch\(...\) first"),
    ],
)
def test_before_there_are_ranks(call, error, said):
    with pytest.raises(error, match=said):
        call()


def test_rank_0_alone(capsys):
    print_rank_0("alone")
    assert capsys.readouterr().out == "alone\n"


def test_the_reference_has_every_name():
    page = (DOCS.parent / "reference" / "colotensor.md").read_text()
    assert {name for name in tensor.__all__ if f"::: shardcore_shardformer.tensor.{name}\n" not in page} == set()
    assert {name for name in tensor.__all__ if f"`{name}" not in DOCS.read_text()} == set()


@pytest.mark.ranks
@pytest.mark.nightly
def test_the_example_of_its_page(tmp_path):
    (snippet,) = re.findall(r"```python\n((?:(?!```).)*?test_dist_cases\(4\)\n)```", DOCS.read_text(), re.S)
    script = tmp_path / "example.py"
    script.write_text(snippet.replace('"nccl"', '"gloo"').replace(".cuda()", ""))
    done = subprocess.run([sys.executable, script], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    torch.manual_seed(0)
    local = torch.randn(2, 3, 1)
    shown = [local, torch.cat([local, local], -1), torch.cat([local, local], -1)[:1]]
    assert done.stdout == "".join(f"shape {each.shape}, {each}\n" for each in shown)
