from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from fused_net import BATCH, IN, adamw, assert_equal, batch, make_context, make_net, shard_net
from needs import FUSED
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from shardcore.comm import strided
from shardcore.nn import FusedColumnLinear, SegmentedLayout, fsdp_placement, reduce_partial_gradients
from shardcore_testing.observing import Collectives

pytestmark = FUSED

# -- gradients ---------------------------------------------------------------------------------------------------------


def backward_twice(segments, size, bias, region, mode):
    reference = make_net(segments, size, bias)
    context = make_context((dist.get_world_size(),), partial_gradients=mode)
    net = shard_net(copy.deepcopy(reference), context, region)
    for step in range(2):
        x, expected_x = batch(step).requires_grad_(), batch(step).requires_grad_()
        out, expected = net(x), reference(expected_x)
        assert_equal(out, expected, "output")
        out.pow(2).mean().backward()
        expected.pow(2).mean().backward()
        assert_equal(x.grad, expected_x.grad, "gradient of the input")
        ours = dict(net.named_parameters())
        for name, parameter in reference.named_parameters():
            assert_equal(ours[name].grad, parameter.grad, f"gradient of {name} after backward {step}")
    if bias and mode == "deferred":
        assert net.qkv.bias.grad.placements == (Partial(),)
        reduce_partial_gradients(net)
    for name, parameter in reference.named_parameters():
        assert ours[name].grad.placements == ours[name].placements
        assert_equal(ours[name].grad, parameter.grad, f"gradient of {name}")


@pytest.mark.parametrize("region", [False, True], ids=["alone", "region"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_gradients_are_those_of_the_whole_linear(pool, world, region):
    pool.run(every_gradient_case, region, world=world)


def every_gradient_case(region):
    for segments in (2, 3):
        for size in (12, 10):  # 10 rows are 5+5, 4+4+2, 3+3+3+1
            for bias in (True, False):
                backward_twice(segments, size, bias, region, "in_backward")
        backward_twice(segments, 12, True, region, "deferred")


def count_collectives(region):
    net = shard_net(make_net(3), make_context((2,)), region)
    with Collectives() as forward:
        out = net(batch(0))
    with Collectives() as backward:
        out.sum().backward()
    assert set(forward.names + backward.names) == {"c10d::allreduce_"}
    return [[size // 8 for size in sorted(sent.bytes)] for sent in (forward, backward)]


@pytest.mark.parametrize("region", [False, True], ids=["alone", "region"])
def test_the_bias_costs_one_collective_of_its_size_in_backward(pool, region):
    x = BATCH * IN
    enters = [x] if region else [x, x]  # of two linears
    assert pool.run(count_collectives, region)[0] == [[x], sorted([3 * 12, *enters])]


def frozen_members():
    reference = make_net(3)
    for frozen in ("weight", "bias"):
        for region in (False, True):
            net, expected = copy.deepcopy(reference), copy.deepcopy(reference)
            for model in (net, expected):
                getattr(model.qkv, frozen).requires_grad_(False)
            shard_net(net, make_context((2,)), region)
            for model in (net, expected):
                model(batch(0)).pow(2).mean().backward()
            ours = dict(net.named_parameters())
            for name, parameter in expected.named_parameters():
                assert (parameter.grad is None) == (ours[name].grad is None), name
                if parameter.grad is not None:
                    assert_equal(ours[name].grad, parameter.grad, name)


def test_a_frozen_weight_or_bias_has_no_gradient(pool):
    pool.run(frozen_members)


def compile_it():
    reference = make_net(3)
    net = shard_net(copy.deepcopy(reference), make_context((2,)))
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        compiled(batch(0)).pow(2).mean().backward()
        reference(batch(0)).pow(2).mean().backward()
    for name, parameter in reference.named_parameters():
        assert_equal(dict(net.named_parameters())[name].grad, parameter.grad, name)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does it
def test_compiled_gradients_without_a_graph_break(pool):
    pool.run(compile_it)


# -- the parameter -----------------------------------------------------------------------------------------------------


def inspect_parameter(segments, size):
    reference = make_net(segments, size)
    net = shard_net(copy.deepcopy(reference), make_context((dist.get_world_size(),)))
    rank, world = dist.get_rank(), dist.get_world_size()
    weight, bias = reference.qkv.weight.detach(), reference.qkv.bias.detach()
    own = torch.cat([part.chunk(world)[rank] for part in weight.chunk(segments)])
    assert torch.equal(net.qkv.weight.to_local(), own)
    assert own.shape == SegmentedLayout(segments).shape(tuple(weight.shape), world, rank)
    assert net.qkv.weight.shape == weight.shape
    assert torch.equal(net.qkv.weight.full_tensor(), weight)
    assert torch.equal(net.qkv.bias.full_tensor(), bias)
    assert net.qkv.bias.placements == (Replicate(),)
    assert isinstance(net.qkv, nn.Linear)
    assert f"segments={segments}" in repr(net.qkv)


def inspect_deepcopy():
    net = shard_net(make_net(3), make_context((2,)))
    twin = copy.deepcopy(net)
    before = net(batch(0)).detach()
    twin(batch(0)).pow(2).mean().backward()
    adamw(twin).step()
    assert torch.equal(net(batch(0)), before)
    assert not torch.equal(twin(batch(0)), before)
    assert net.qkv.weight.grad is None
    assert (twin.qkv.segments, twin.qkv.bias_rows) == (net.qkv.segments, net.qkv.bias_rows)


@pytest.mark.parametrize(("world", "size"), [(2, 12), (3, 10), (4, 10)])
def test_the_weight_has_its_native_shape_and_order(pool, world, size):
    for segments in (2, 3):
        pool.run(inspect_parameter, segments, size, world=world)


def test_a_deep_copy_is_independent(pool):
    pool.run(inspect_deepcopy)


# -- what is patched, and what is not ----------------------------------------------------------------------------------


def other_tensors():
    context = make_context((2, 2))
    shard_net(make_net(3), context)  # the patches are in place
    before = DTensor.__create_chunk_list__
    shard_net(make_net(3), context)
    assert DTensor.__create_chunk_list__ is before
    linear = nn.Linear(IN, 7)
    whole_weight = linear.weight.detach().clone()
    linear.weight = nn.Parameter(distribute_tensor(whole_weight, context.tp, [Shard(0)]))
    linear.bias = None
    assert fsdp_placement(linear.weight) is None
    fully_shard(linear, mesh=context.mesh["dp_shard"], shard_placement_fn=fsdp_placement)
    assert strided._blocks(linear.weight) is None
    assert linear.weight.__create_chunk_list__() == before.__wrapped__(linear.weight)
    assert torch.equal(linear.weight.detach().full_tensor(), whole_weight)


def test_other_tensors_stay_with_torch(pool):
    pool.run(other_tensors, world=4)


def chunks_of_torch():
    net = shard_net(make_net(3), make_context((2,)))
    return len(DTensor.__create_chunk_list__.__wrapped__(net.qkv.weight)), len(net.qkv.weight.__create_chunk_list__())


def test_torch_itself_still_knows_one_chunk(pool):
    """When this fails, upstream learned it: see what would remove the patches in docs/adr/0001."""
    assert pool.run(chunks_of_torch)[0] == (1, 3)


@pytest.mark.parametrize(
    ("options", "features", "message"),
    [
        ({"segments": 3}, 36, None),
        ({"segments": (16, 4, 4)}, 24, "segments is (16, 4, 4); say how many equal segments"),
        (
            {"segments": 3, "gather_output": True},
            36,
            "not understand gather_output; its options are enters, segments",
        ),
        ({"segments": 3, "replication": 2}, 36, "not understand replication; its options are enters, segments"),
        ({"segments": 5}, 36, "out_features 36 is not 5 equal segments"),
        ({"segments": 1}, 36, "segments is 1; say how many"),
        ({}, 36, "segments is None; say how many"),
        ({"segments": 2}, 10, "has 2 segments of 5 output features, which leaves the last of 4 ranks without any"),
    ],
)
def test_what_cannot_be_split_is_reported(options, features, message):
    problem = FusedColumnLinear.refusal(nn.Linear(IN, features), 4, **options)
    assert problem is None if message is None else message in problem


def raises():
    errors = []
    for segments in ((16, 4, 4), 5):
        try:
            FusedColumnLinear.from_native_module(nn.Linear(IN, 24), dist.group.WORLD, segments=segments)
        except ValueError as error:
            errors.append(str(error).partition(";")[0])
    return errors


def test_unequal_segments_are_not_supported(pool):
    wanted = ["segments is (16, 4, 4)", "out_features 24 is not 5 equal segments"]
    assert pool.run(raises) == [wanted] * 2


def test_a_layout_says_what_it_does():
    assert str(SegmentedLayout(3)) == "3 segments, each split on dim 0"
    assert [SegmentedLayout(2).shape((20, 4), 4, rank) for rank in range(4)] == [(6, 4), (6, 4), (6, 4), (2, 4)]
