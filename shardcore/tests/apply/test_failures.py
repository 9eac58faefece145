"""An error on one rank is a `ShardcoreError` on all, and a model that was half changed can no longer be used."""

from __future__ import annotations

import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from needs import FUSED
from plain import Gain, ShardformerStyle, plain
from tiny import TinyLM, TinyPolicy, batch, build
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import shardcore
from shardcore.errors import AgreementError, ConfigError, PartlyShardedError, PlanError, ShardcoreError
from shardcore.policy import Policy
from shardcore.styles import region, segments
from shardcore_shardformer import ModulePolicyDescription
from shardcore_testing.parity import assert_close, assert_same_parameters


def _shard(model, **arguments):
    return shardcore.shard(model, **{"policy": TinyPolicy, "tp": 2, **arguments})


class Abstract(Policy):
    pass


WRONG = {
    "None": lambda: _shard(None),
    "a list": lambda: _shard([build()]),
    "a class": lambda: _shard(TinyLM),
    "policy='x'": lambda: _shard(build(), policy="x"),
    "an abstract policy": lambda: _shard(build(), policy=Abstract),
    "optimizer=3": lambda: _shard(build(), optimizer=3),
    "an optimizer that was never initialised": lambda: _shard(build(), optimizer=object.__new__(torch.optim.SGD)),
    "wrap='no'": lambda: _shard(build(), wrap="no"),
    **{f"sync_from={x!r}": (lambda x=x: _shard(build(), sync_from=x)) for x in (7, True, "a", -1, 0.0)},
}


def wrong_arguments():
    told = []
    for what, call in WRONG.items():
        with pytest.raises(ConfigError):
            call()
        right = dist.get_rank() == 0
        with pytest.raises(AgreementError if right else ConfigError) as caught:
            _shard(build(), sync_from=0 if "sync" in what else None) if right else call()
        told.append((what, str(caught.value)))
    return told


def test_a_wrong_argument_of_one_rank_is_an_error_on_all(pool):
    zero, one = pool.run(wrong_arguments, world=2)
    for (what, message), (_, own) in zip(zero, one, strict=True):
        assert f"rank 1 failed, so no rank was changed. Its error: ConfigError: {own}" in message, what
    texts = dict(one)
    assert "got a NoneType; pass the model itself" in texts["None"]
    assert "got the class TinyLM; pass the model itself" in texts["a class"]
    assert texts["sync_from=7"].startswith("sync_from=7 is none of the ranks that shard this model: 0, 1;")
    assert texts["sync_from=True"] == "sync_from must be the number of a global rank, from 0, or None; got True"


def wrong_place():
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    tp = 2 if dist.get_rank() == 0 else 3
    with pytest.raises(ShardcoreError, match="tensor_parallel_size is 3, but device_mesh says 2"):
        shardcore.shard(build(), policy=TinyPolicy, device_mesh=mesh, tp=tp)


def test_an_error_beside_a_mesh_of_the_caller(pool):
    pool.run(wrong_place, world=2)


class Preprocessing(TinyPolicy):
    def preprocess(self):
        if dist.get_rank() == 1:
            sys.exit(3)


class Planning(TinyPolicy):
    def module_policy(self):
        if dist.get_rank() == 1:
            raise KeyboardInterrupt
        return super().module_policy()


class Replacing(ShardformerStyle):
    def module_policy(self):
        return {**super().module_policy(), Gain: ModulePolicyDescription(param_replacement=[leave])}


def leave(module, process_group):
    if dist.get_rank() == 1:
        sys.exit("enough")


def leaving():
    for policy, make, ends, when in (
        (Planning, build, KeyboardInterrupt, None),
        (Preprocessing, build, SystemExit, PartlyShardedError),
        (Replacing, plain, SystemExit, PartlyShardedError),
    ):
        model, one = make(), dist.get_rank() == 1
        with pytest.raises(ends if one else when or AgreementError, match=None if one else f"{ends.__name__}: "):
            _shard(model, policy=policy)
        if when is not None:
            with pytest.raises(PartlyShardedError, match=ends.__name__):
                model(batch())


def test_code_of_users_that_ends_the_process_is_told_to_the_others(pool):
    pool.run(leaving, world=2)


class Broken(TinyPolicy):
    def module_policy(self):
        return self.model.nothing


def broken_policy():
    with pytest.raises(PlanError, match=r"Broken\.module_policy\n") as caught:
        _shard(build(), policy=Broken)
    assert "it raised AttributeError: 'TinyLM' object has no attribute 'nothing'" in str(caught.value)


def test_a_policy_that_raises(pool):
    pool.run(broken_policy, world=2)


class Fused(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 24), nn.Linear(8, width)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(q * k + v)


class FusedNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a = Fused(width)

    def forward(self, x):
        return x + self.a(x)


class FusedPolicy(Policy):
    def module_policy(self):
        return {"FusedNet": [region(enter="a", col=segments("a.qkv", 3), row="a.out")]}


def uneven_columns():
    model = FusedNet(9)
    with pytest.raises(
        PlanError, match=r"a\.qkv\.weight: FSDP2 cuts this fused weight \(24, 9\) along dim 1"
    ) as caught:
        shardcore.shard(model, policy=FusedPolicy, tp=2, dp=2)
    assert "use a dp_shard_size that divides 9" in str(caught.value)
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    assert shardcore.shard(model, policy=FusedPolicy, tp=2, dp=2, dp_replicate_size=2) is model
    assert isinstance(model, FSDPModule)


@pytest.mark.nightly
@FUSED
def test_what_fsdp_would_refuse_is_said_before(pool):
    pool.run(uneven_columns, world=4)


def refused_by_fsdp():
    model = build()
    model.head.weight.data = model.head.weight.data.t().contiguous().t()
    with pytest.raises(PlanError, match=r"head\.weight: FSDP2 cannot shard a parameter that is not contiguous"):
        shardcore.shard(model, policy=TinyPolicy, tp=1, dp=2)


def fails_while_wrapping():
    """fully_shard fails on one rank only, for a reason that nobody could foresee."""
    real, calls = shardcore.fsdp.phase.fully_shard, []

    def fail(module, **options):
        calls.append(module)
        if len(calls) == 2 and dist.get_rank() == 1:
            raise MemoryError("no room")
        return real(module, **options)

    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        mock.patch.object(shardcore.fsdp.phase, "fully_shard", fail),
        pytest.raises(PartlyShardedError, match="MemoryError: no room") as caught,
    ):
        shardcore.shard(model, policy=TinyPolicy, tp=1, dp=2, optimizer=optimizer)
    assert "The model is unusable; build it anew." in str(caught.value)
    with pytest.raises(PartlyShardedError, match="no room"):
        model(batch())


class Resizing(TinyPolicy):
    def preprocess(self):
        self.model.head = nn.Linear(32, 40, bias=False, dtype=torch.float64)


def loses_a_parameter():
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(PartlyShardedError, match=r"optimizer= holds head\.bias, which the model lost"):
        _shard(model, policy=Resizing, optimizer=optimizer)
    with pytest.raises(PartlyShardedError):
        model(batch())


def around_fsdp():
    refused_by_fsdp()
    fails_while_wrapping()
    loses_a_parameter()


def test_failures_after_the_model_was_sharded(pool):
    pool.run(around_fsdp, world=2)


def in_inference_mode():
    model = build()
    with torch.inference_mode():
        _shard(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    model(batch(), labels=batch()).backward()
    assert not any(p.is_inference() for p in model.parameters())
    with torch.inference_mode():
        model = build()
    with pytest.raises(PlanError, match=r"it was made under torch.inference_mode\(\) and can never be trained"):
        _shard(model)


class Odd(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.up.weight = nn.Parameter(weight, requires_grad=weight.is_complex())


class OddPolicy(Policy):
    def module_policy(self):
        return {"Odd": [region(enter="", col="up", row="down")]}


def odd_parameters():
    for weight in (torch.ones(8, 4, dtype=torch.complex64), torch.ones(8, 4, dtype=torch.int8)):
        with pytest.raises(PlanError, match=rf"up\.weight: a parameter of {weight.dtype} cannot be split"):
            _shard(Odd(weight), policy=OddPolicy)
    with pytest.raises(
        PlanError, match=r"up\.weight: 1 of the 4 parameters are on the meta device, and the others not"
    ):
        _shard(Odd(torch.ones(8, 4, device="meta")), policy=OddPolicy)
    in_inference_mode()


def test_parameters_that_cannot_be_sharded(pool):
    pool.run(odd_parameters, world=2)


class Alias(TinyLM):
    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.same_table = self.table


def from_one_rank():
    """The others have nothing but a configuration, another mode, or tensors that cannot be written in place."""
    reference = Alias(build().config)
    with torch.no_grad():
        for number, parameter in enumerate(reference.parameters()):
            parameter.fill_(number + 1)
    for tp, dp in ((2, 1), (1, 2)):
        if dist.get_rank() == 1:
            model = Alias(reference.config)
            model.load_state_dict(reference.state_dict())
            model.eval()
            model.model.norm.train()
        else:
            with torch.device("meta"):
                model = Alias(reference.config)
        shardcore.shard(model, policy=TinyPolicy, tp=tp, dp=dp, sync_from=1)
        assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
        assert_same_parameters(reference, model)
        assert torch.equal(model.table, torch.arange(4.0))
        assert model.same_table is model.table
        assert not model.training
        assert not model.model.layers[0].mlp.drop.training
        assert model.model.norm.training
        assert_close(reference(batch()), model(batch()), "output")


def nothing_to_take():
    with torch.device("meta"):
        model = TinyLM(build().config)
    with pytest.raises(ShardcoreError, match=r"sync_from=0, but model\.positions is on the meta device there"):
        _shard(model if dist.get_rank() == 0 else build(dtype=torch.float32), sync_from=0)
    with torch.device("meta"):
        model = TinyLM(build().config)
        model.plain = torch.zeros(2)
    with pytest.raises(ShardcoreError, match=r"and plain is neither: it is a plain attribute on the meta device"):
        _shard(model if dist.get_rank() == 1 else build(dtype=torch.float32), sync_from=0)


def expanded():
    model = build(seed=dist.get_rank())
    model.model.norm.weight = nn.Parameter(torch.full((1,), 1.0 + dist.get_rank(), dtype=torch.float64).expand(32))
    _shard(model, sync_from=0)
    assert torch.equal(model.model.norm.weight.full_tensor(), torch.ones(32, dtype=torch.float64))


def taking():
    from_one_rank()
    nothing_to_take()
    expanded()


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")  # so does nn.Linear
def test_weights_and_mode_of_one_rank(pool):
    pool.run(taking, world=2)
