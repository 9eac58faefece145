from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fused_net import (
    assert_equal,
    assert_same_state,
    batch,
    make_context,
    make_net,
    make_sharded,
    ranks,
    shard_net,
    train,
    trained,
)
from needs import FUSED
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from shardcore.errors import NotSupportedError
from shardcore.fsdp.phase import apply_data_parallel

pytestmark = FUSED

# -- checkpoints -------------------------------------------------------------------------------------------------------


def state_of(net, optimizer):
    model, optim = get_state_dict(net, optimizer)
    return {"model": model, "optim": optim}


def save(folder, shape):
    for segments in (2, 3):
        net, optimizer, part = make_sharded(segments, shape)
        train(net, optimizer, range(2), **part)
        dcp.save(state_of(net, optimizer), checkpoint_id=f"{folder}/{segments}")


def load_and_go_on(folder, shape):
    for segments in (2, 3):
        reference, reference_optimizer, _ = trained(segments)
        net, optimizer, part = make_sharded(segments, shape, seed=5)
        state = state_of(net, optimizer)
        dcp.load(state, checkpoint_id=f"{folder}/{segments}")
        set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        assert_same_state(net, optimizer, reference, reference_optimizer)
        train(net, optimizer, [2], **part)
        train(reference, reference_optimizer, [2])
        assert_same_state(net, optimizer, reference, reference_optimizer)


@pytest.mark.parametrize(
    ("source", "targets"),
    [((2,), [None, (4,), (2, 2)]), ((3,), [(2,)]), ((2, 2), [None, (4,)]), (None, [(2,), (2, 2)])],
    ids=["tp2", "tp3", "fsdp2-tp2", "plain"],
)
def test_a_checkpoint_continues_on_other_ranks_with_its_optimizer(pool, tmp_path, source, targets):
    pool.run(save, str(tmp_path), source, world=ranks(source))
    for target in targets:
        pool.run(load_and_go_on, str(tmp_path), target, world=ranks(target))


def whole_state_dicts(shape):
    reference, reference_optimizer, _ = trained(3)
    model, optim = get_state_dict(reference, reference_optimizer)
    for from_rank0 in (True, False):
        net, optimizer, _ = make_sharded(3, shape, seed=5)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank0)
        holds = dist.get_rank() == 0 or not from_rank0
        set_model_state_dict(net, copy.deepcopy(model) if holds else {}, options=options)
        set_optimizer_state_dict(net, optimizer, copy.deepcopy(optim) if holds else {}, options=options)
        assert_same_state(net, optimizer, reference, reference_optimizer)
        for name, tensor in get_model_state_dict(net, options=StateDictOptions(full_state_dict=True)).items():
            assert torch.equal(tensor, model[name].detach()), name

    with torch.device("meta"):
        net = shard_net(make_net(3), make_context((1, *shape)[-2:]))
    set_model_state_dict(
        net,
        copy.deepcopy(model) if dist.get_rank() == 0 else {},
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    for name, parameter in net.named_parameters():
        assert torch.equal(parameter.detach().full_tensor(), model[name].detach()), name


@pytest.mark.filterwarnings("ignore:(`_get_pg_default_device`|Multiple backends):UserWarning")  # torch's own call
@pytest.mark.parametrize("shape", [(3,), (2, 2)], ids=["tp3", "fsdp2-tp2"])
def test_one_whole_state_dict_is_distributed_and_gathered(pool, shape):
    pool.run(whole_state_dicts, shape, world=ranks(shape))


# -- data parallelism --------------------------------------------------------------------------------------------------


def data_parallel(shape, options):
    for segments in (2, 3):
        reference, reference_optimizer, expected = trained(segments, 3, **options)
        net, optimizer, part = make_sharded(segments, shape, **options)
        norms = train(net, optimizer, range(3), **part)
        torch.testing.assert_close(norms, expected, rtol=1e-11, atol=0.0)
        assert min(expected) > 0.05  # clipping did something
        assert_same_state(net, optimizer, reference, reference_optimizer)
        for name, parameter in net.named_parameters():
            assert_equal(parameter.grad, dict(reference.named_parameters())[name].grad, f"gradient of {name}")


@pytest.mark.parametrize(
    "options", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}], ids=["default", "foreach", "loop", "fused"]
)
def test_steps_under_fsdp2_are_those_of_the_whole_model(pool, options):
    pool.run(data_parallel, (2, 2), options, world=4)


@pytest.mark.parametrize("shape", [(2,), (2, 1, 2)], ids=["tp2", "replicas2-tp2"])
def test_steps_of_replicas_are_those_of_the_whole_model(pool, shape):
    pool.run(data_parallel, shape, {}, world=ranks(shape))


def accumulate_under_fsdp(mode):
    reference = make_net(3)
    context = make_context((2, 2), partial_gradients=mode)
    net = shard_net(copy.deepcopy(reference), context, region=True)
    apply_data_parallel(net, context, None)
    for step in range(2):
        net(batch(step).chunk(2)[context.replica]).pow(2).mean().backward()
        reference(batch(step)).pow(2).mean().backward()
    for name, parameter in reference.named_parameters():
        assert_equal(dict(net.named_parameters())[name].grad, parameter.grad, name)


@pytest.mark.parametrize("mode", ["in_backward", "deferred"])
def test_gradients_accumulate_in_a_region_under_fsdp2(pool, mode):
    pool.run(accumulate_under_fsdp, mode, world=4)


def shard_without_placement():
    context = make_context((2, 2))
    mesh = context.mesh["dp_shard"]
    ways = [
        lambda net: net,
        lambda net: net.float(),
        copy.deepcopy,
        lambda net: net.to("meta").to_empty(device="cpu"),
        lambda net: (net.load_state_dict(net.state_dict(), assign=True), net)[1],
    ]
    messages = []
    for way in ways:
        with pytest.raises(NotSupportedError) as error:
            fully_shard(way(shard_net(make_net(3), context)), mesh=mesh)
        messages.append(str(error.value))
    asked = []
    net = shard_net(make_net(3), context)
    apply_data_parallel(net, context, None, shard_placement_fn=lambda p: asked.append(p.shape))
    assert set(asked) == {p.shape for p in net.parameters() if p is not net.qkv.weight}
    assert net.qkv.weight.placements[:1] == (Shard(1),)
    return messages


def test_fully_shard_refuses_a_fused_weight_unless_told_where_to_cut(pool):
    for messages in pool.run(shard_without_placement, world=4):
        expected = (
            "fully_shard would cut the fused tensor-parallel weight 'weight' (36, 8) on dim 0, along which each rank "
            "already holds several runs; pass shard_placement_fn=shardcore.nn.fsdp_placement to every fully_shard that "
            "covers it"
        )
        assert set(messages) == {expected}
