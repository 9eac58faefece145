"""Applying a plan: the Shardformer way of writing it, and input that must be refused on every rank."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny import TinyLM, TinyPolicy, batch, build, randomize, shard
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

import shardcore
from shardcore.comm import copy_to_tp, gather_from_tp
from shardcore.compat import Linear1D_Col, Linear1D_Row, VocabParallelEmbedding1D
from shardcore.config import ShardConfig
from shardcore.errors import (
    AgreementError,
    AlreadyShardedError,
    ConfigError,
    NoPolicyError,
    PartlyShardedError,
    PlanError,
    WrapError,
)
from shardcore.mesh import context_of
from shardcore.nn import ParallelModule, RowLinear
from shardcore.policy import ModulePolicyDescription, Policy, SubModuleReplacementDescription
from shardcore.sharder import ModelSharder
from shardcore.styles import attribute, norm, replicate
from shardcore.testing.parity import assert_close, assert_same_gradients, assert_same_parameters

# --- a plain model, and a policy as people wrote them for Shardformer ---


class Mixer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, width))
        self.bias = nn.Parameter(torch.empty(width))
        self.scale = nn.Parameter(torch.empty(width))

    def forward(self, x):
        return F.linear(x, self.weight, self.bias) * self.scale


class ParallelMixer(ParallelModule):
    """A user's own module, with plain local parameters."""

    @staticmethod
    def from_native_module(module, process_group, **kwargs):
        new = ParallelMixer()
        new.group, new.width, new.kwargs = process_group, module.bias.numel(), kwargs
        rank, world = dist.get_rank(process_group), dist.get_world_size(process_group)
        new.weight = nn.Parameter(module.weight.detach().chunk(world)[rank].clone())
        new.bias = nn.Parameter(module.bias.detach().chunk(world)[rank].clone())
        new.scale = nn.Parameter(module.scale.detach().clone())
        return new

    def forward(self, x):
        assert not isinstance(self.weight, DTensor), "it computes on local tensors"
        out = F.linear(copy_to_tp(x, self.group), self.weight, self.bias)
        return gather_from_tp(out, self.group, -1, self.width) * self.scale


class Gain(nn.Module):
    """Acts on split activations, so its parameter has to be cut by hand."""

    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.empty(width))

    def forward(self, x):
        return x * self.gain


class PlainBlock(nn.Module):
    def __init__(self, width=8, inner=24):
        super().__init__()
        self.parts = 4
        self.norm = nn.LayerNorm(width)
        self.gate, self.up = nn.Linear(width, inner), nn.Linear(width, inner)
        self.gain = Gain(inner)
        self.down = nn.Linear(inner, width)
        self.mixer = Mixer(width)

    def scaled(self, x):
        return x * 3 / x.size(-1)

    def forward(self, x):
        x = self.norm(x)
        h = self.gain(F.silu(self.gate(x)) * self.up(x))
        h = self.scaled(h.unflatten(-1, (self.parts, -1)).softmax(-1).flatten(-2))
        return self.mixer(self.down(h))


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(13, 8)
        self.blocks = nn.ModuleList(PlainBlock() for _ in range(2))
        self.out = nn.Linear(8, 13, bias=False)

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.out(x)


def cut_gain(module, process_group):
    rank, world = dist.get_rank(process_group), dist.get_world_size(process_group)
    module.gain = nn.Parameter(module.gain.detach().chunk(world)[rank].clone())


def scaled_by_the_whole(self, x):
    return x * 3 / self.down.in_features


class ShardformerStyle(Policy):
    def module_policy(self):
        world = dist.get_world_size()
        return {
            PlainBlock: ModulePolicyDescription(
                attribute_replacement={"parts": self.model.blocks[0].parts // world},
                sub_module_replacement=[
                    SubModuleReplacementDescription("gate", Linear1D_Col),
                    SubModuleReplacementDescription("up", Linear1D_Col, {}),
                    SubModuleReplacementDescription("down", Linear1D_Row),
                    SubModuleReplacementDescription("mixer", ParallelMixer, {"note": [1, 2]}),
                    SubModuleReplacementDescription("dropout", Linear1D_Col, None, True),
                ],
                method_replacement={"scaled": scaled_by_the_whole},
            ),
            Gain: ModulePolicyDescription(param_replacement=[cut_gain]),
            Plain: ModulePolicyDescription(
                sub_module_replacement=[
                    SubModuleReplacementDescription("table", VocabParallelEmbedding1D),
                    SubModuleReplacementDescription("out", Linear1D_Col, {"gather_output": True}),
                ]
            ),
            nn.LayerNorm: [norm("")],
        }


def _plain():
    model = Plain().double()
    randomize(model)
    return model


def _train(model, seed=0, vocab=13):
    ids = batch(seed, vocab=vocab)
    out = model(ids)
    (out.tanh() * torch.linspace(-1, 2, vocab, dtype=torch.float64)).sum().backward()
    return out


def shardformer_style():
    for order in (0, 1):
        reference = _plain()
        twin = _plain()
        before = twin(batch(vocab=13))
        sharded = copy.deepcopy(reference)
        config = ShardConfig(tensor_parallel_size=dist.get_world_size())
        policy = ShardformerStyle()
        sharder = ModelSharder(sharded, *((policy, config) if order == 0 else (config, policy)))
        assert sharder.shard() is sharded
        for seed in (0, 1):
            assert_close(_train(reference, seed), _train(sharded, seed), "output")
        assert_same_gradients(reference, sharded)
        assert all(isinstance(p, DTensor) and isinstance(p.grad, DTensor) for p in sharded.parameters())
        assert {n for n, _ in reference.named_parameters()} == {n for n, _ in sharded.named_parameters()}
        mixer = sharded.blocks[0].mixer
        assert isinstance(mixer, ParallelMixer)
        assert mixer.kwargs == {"note": [1, 2]}
        assert mixer.weight.placements == (Shard(0),)
        assert mixer.scale.placements == (Replicate(),)
        assert tuple(mixer.weight.shape) == (8, 8)
        assert sharded.blocks[0].gain.gain.placements == (Shard(0),)
        # H27: nothing about the classes has changed.
        assert torch.equal(before, twin(batch(vocab=13)))
        assert torch.equal(before, _plain()(batch(vocab=13)))
        assert type(twin.blocks[0]) is PlainBlock
        assert PlainBlock.scaled is not scaled_by_the_whole

    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=True) for m in (reference, sharded)]
    for model, optimizer in zip((reference, sharded), optimizers, strict=True):
        nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
        optimizer.step()
    assert_same_parameters(reference, sharded)
    clone = copy.deepcopy(sharded)
    reference.zero_grad()
    clone.zero_grad()
    _train(reference)
    _train(clone)
    assert_same_gradients(reference, clone)


@pytest.mark.parametrize("world", [2, 4])
def test_a_policy_written_for_shardformer(pool, world):
    pool.run(shardformer_style, world=world)


def _kinds(model):
    return [(n, type(m), len(m._forward_pre_hooks)) for n, m in model.named_modules()]


def _assert_unchanged(model, kinds, values):
    assert _kinds(model) == kinds
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    assert all(torch.equal(values[n], p) for n, p in model.state_dict().items())
    assert context_of(model) is None


def _refused(kind, match, *, model=None, **arguments):
    """Shard and expect an error of this kind on this rank, with nothing changed; then shard for real."""
    model = build() if model is None else model
    kinds, values = _kinds(model), copy.deepcopy(model.state_dict())
    with pytest.raises(kind, match=match) as caught:
        shardcore.shard(model, **{"policy": TinyPolicy, **arguments})
    assert type(caught.value) is kind
    _assert_unchanged(model, kinds, values)
    return str(caught.value)


class Elsewhere(TinyPolicy):
    """Another plan on rank 1."""

    def module_policy(self):
        rows = super().module_policy()
        extra = [attribute("attention.head_dim", 5)] if dist.get_rank() == 1 else []
        return {**rows, "Block": [*rows["Block"], *extra]}


class FailsOnOne(TinyPolicy):
    def module_policy(self):
        if dist.get_rank() == 1:
            raise LookupError("no such file")
        return super().module_policy()


class CannotBeMade(TinyPolicy):
    def __init__(self):
        super().__init__()
        if dist.get_rank() == 1:
            raise LookupError("no such file")


class BadMixer(ParallelMixer):
    """Cannot be made on rank 1; on all ranks one of its parameters is not a part of the native one."""

    @staticmethod
    def from_native_module(module, process_group, **kwargs):
        if kwargs.get("fail") and dist.get_rank() == 1:
            raise ArithmeticError("in the user's class")
        new = ParallelMixer.from_native_module(module, process_group, **kwargs)
        if not kwargs.get("fail"):
            new.scale = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        return new


class BadMixerPolicy(ShardformerStyle):
    options = {"fail": True}  # noqa: RUF012

    def module_policy(self):
        policy = super().module_policy()
        policy[PlainBlock].sub_module_replacement[3] = SubModuleReplacementDescription("mixer", BadMixer, self.options)
        return policy


class BadShapePolicy(BadMixerPolicy):
    options = {}  # noqa: RUF012


def refusals():
    rank, world = dist.get_rank(), dist.get_world_size()
    start = "tensor_parallel_size 3 times data_parallel_size 1 is 3, but there are 4 ranks; start 3 ranks"
    assert _refused(ConfigError, "there are 4 ranks", tp=3).startswith(start)
    assert "use a tensor_parallel_size of 1, 2" in _refused(PlanError, "2 query heads", model=build(heads=2), tp=4)
    _refused(NoPolicyError, "TinyLM", policy=None, tp=world)

    different = build()
    with torch.no_grad():
        different.model.layers[1].mlp.up.bias[3] += rank == 2
    text = _refused(AgreementError, "ranks 0 and 2 differ in tensor", model=different, tp=world)
    assert "tensor model.layers.1.mlp.up.bias (44,) torch.float64: " in text
    assert "pass sync_from=0 to take the weights of rank 0" in text
    moved = build()
    moved.register_buffer("steps", torch.tensor(rank))
    _refused(AgreementError, r"differ in tensor steps \(\) torch.int64", model=moved, tp=world)
    _refused(AgreementError, "differ in step", policy=Elsewhere, tp=world)
    text = _refused(
        AgreementError,
        "differ in ShardConfig.partial_gradients",
        tp=world,
        partial_gradients="deferred" if rank else "in_backward",
    )
    assert "Start every rank from the same environment" in text
    other = build(layers=2 + rank % 2)
    _refused(AgreementError, "ranks 0 and 1 differ", model=other, tp=world)

    for arguments in ({"policy": FailsOnOne}, {"policy": CannotBeMade}):
        if rank == 1:
            _refused(LookupError, "no such file", tp=world, **arguments)
        else:
            text = _refused(AgreementError, "rank 1 failed, so no rank was changed", tp=world, **arguments)
            assert "Its error: LookupError: no such file\nrank 0 did not fail; " in text
    for wrong in ({"policy": object()}, {"policy": TinyPolicy, "nonsense": 3}, {"config": 7}):
        arguments = wrong if rank == 1 else {"policy": TinyPolicy}
        if rank == 1:
            _refused(ConfigError, "got object|nonsense|wanted a ShardConfig, got 7", tp=world, **arguments)
        else:
            _refused(AgreementError, "rank 1 failed, so no rank was changed. Its error: ConfigError", tp=world)

    model = _plain()
    kind = ArithmeticError if rank == 1 else AgreementError
    _refused(kind, "in the user's class", model=model, policy=BadMixerPolicy, tp=world)
    text = _refused(ConfigError, "BadMixer", model=model, policy=BadShapePolicy, tp=world)
    assert text == (
        "BadMixer.from_native_module at blocks.0.mixer: its parameter 'scale' of ParallelMixer has shape (3,), neither "
        f"the whole (8,) nor rank {rank}'s part of it along one dim (as torch.chunk cuts it)"
    )
    shardcore.shard(model, policy=ShardformerStyle, tp=world)
    assert_close(_plain()(batch(vocab=13)), model(batch(vocab=13)), "after all refusals")


def test_bad_input_is_one_error_on_every_rank_and_changes_nothing(pool):
    pool.run(refusals, world=4, timeout=100)


def synchronized():
    model = build(seed=dist.get_rank())
    model.register_buffer("steps", torch.tensor(5 + dist.get_rank()))
    shardcore.shard(model, policy=TinyPolicy, tp=2, sync_from=1)
    reference = build(seed=1)
    assert_same_parameters(reference, model)
    assert model.steps.item() == 6
    assert_close(reference(batch()), model(batch()), "output")


def test_weights_of_one_rank(pool):
    pool.run(synchronized, world=2)


def twice():
    model = shard(build())
    for again, text in (
        (
            model,
            "this TinyLM cannot be sharded: it was sharded before. Build the model anew to shard it in another way.",
        ),
        (model.model, "this Decoder cannot be sharded: it was sharded before."),
        (model.model.layers[0], "this Block cannot be sharded: its submodule "),
        (nn.Sequential(model.model.layers[1].mlp), "this Sequential cannot be sharded: its submodule '0.gate' was"),
    ):
        with pytest.raises(AlreadyShardedError) as caught:
            shardcore.shard(again, policy=TinyPolicy, tp=2)
        assert str(caught.value).startswith(text)
    plain = nn.Sequential(nn.Linear(2, 2))
    plain[0].weight = model.model.layers[0].mlp.up.weight
    with pytest.raises(AlreadyShardedError, match=r"its parameter '0\.weight' is a DTensor already. Call shard"):
        shardcore.shard(plain, policy=TinyPolicy, tp=2)


class Preprocessed(TinyPolicy):
    """Brings a plan of its own, for a model that `preprocess` has changed."""

    def preprocess(self):
        self.model.head = nn.Linear(32, 40, dtype=torch.float64)
        randomize(self.model.head)

    def new_model_class(self):
        return Renamed

    def postprocess(self):
        self.model.done = (type(self.model.head).__name__, tuple(self.model.head.weight.shape))


class Renamed(TinyLM):
    def tell(self):
        return "renamed"


def hooks_of_a_policy():
    reference = build()
    reference.head = nn.Linear(32, 40, dtype=torch.float64)
    randomize(reference.head)
    model = shard(build(), Preprocessed)
    assert model.done == ("ColumnLinear", (40, 32))
    assert model.tell() == "renamed"
    assert type(model).__name__ == "Renamed"
    assert_close(reference(batch()), model(batch()), "output")


class FailsEverywhere(TinyPolicy):
    def postprocess(self):
        raise ArithmeticError("late")


class FailsLate(FailsEverywhere):
    def postprocess(self):
        if dist.get_rank() == 1:
            super().postprocess()


class FailsEarly(TinyPolicy):
    def preprocess(self):
        if dist.get_rank() == 1:
            raise ArithmeticError("early")


class CutsWrong(ShardformerStyle):
    def module_policy(self):
        return {**super().module_policy(), Gain: ModulePolicyDescription(param_replacement=[cut_wrong])}


def cut_wrong(module, process_group):
    raise ArithmeticError("cut")


class ShapesWrong(ShardformerStyle):
    def module_policy(self):
        return {**super().module_policy(), Gain: ModulePolicyDescription(param_replacement=[shape_wrong])}


def shape_wrong(module, process_group):
    module.gain = nn.Parameter(module.gain.detach()[:5].clone())


class NoSubclass(TinyPolicy):
    def new_model_class(self):
        return nn.Linear


class Stubborn(nn.Module):
    """An attribute that exists and cannot be set."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @property
    def heads(self):
        return 3

    def forward(self, x):
        return self.linear(x)


class StubbornPolicy(Policy):
    def module_policy(self):
        return {"Stubborn": [replicate("linear"), attribute("heads", 2)]}


def half_way():
    for model, policy, text in (
        (
            build(),
            FailsEverywhere,
            "FailsEverywhere.postprocess failed while the TinyLM was being sharded: ArithmeticErr",
        ),
        (build(), FailsLate, "ArithmeticError: late"),
        (build(), FailsEarly, "ArithmeticError: early"),
        (_plain(), CutsWrong, "param_replacement cut_wrong failed at 'blocks.0.gain': ArithmeticError: cut"),
        (_plain(), ShapesWrong, r"param_replacement at 'blocks.0.gain': its parameter 'gain' of Gain has shape \(5,\)"),
        (build(), NoSubclass, "NoSubclass.new_model_class returned Linear, which is not a subclass of TinyLM"),
        (Stubborn(), StubbornPolicy, "heads"),
    ):
        with pytest.raises(PartlyShardedError, match=text):
            shardcore.shard(model, policy=policy, tp=2)
        with pytest.raises(PartlyShardedError, match=text):
            model(batch())
        with pytest.raises(AlreadyShardedError):
            shardcore.shard(model, policy=policy, tp=2)


def test_sharding_twice(pool):
    pool.run(twice, world=2)


def test_what_a_policy_does_around_sharding(pool):
    pool.run(hooks_of_a_policy, world=2)


def test_user_code_that_fails_half_way(pool):
    pool.run(half_way, world=2)


def ties():
    """H15."""
    reference = build(tied=True)
    sharded = shard(copy.deepcopy(reference))
    assert sharded.head.weight is sharded.model.embed.weight
    assert len(list(sharded.parameters())) == len(list(reference.parameters()))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (reference, sharded)]
    for seed in range(3):
        for model, optimizer in zip((reference, sharded), optimizers, strict=True):
            optimizer.zero_grad()
            model(batch(seed), labels=batch(seed)).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            if model is reference:
                wanted = norm
        assert_close(wanted, norm, "norm")
        assert_same_gradients(reference, sharded)
    assert_same_parameters(reference, sharded)
    assert sharded.head.weight is sharded.model.embed.weight
    assert set(reference.state_dict()) == set(sharded.state_dict())


def wrappers_and_moves():
    model = shard(build())
    with pytest.raises(WrapError) as caught:
        DistributedDataParallel(model)
    assert str(caught.value) == (
        "DistributedDataParallel cannot wrap a sharded model: its parameters are DTensors. Give shard() a data axis "
        "(shardcore.shard(model, tp=..., dp=...)), or call torch.distributed.fsdp.fully_shard on the blocks and on the "
        "model with the data-parallel mesh; both work on DTensor parameters."
    )
    assert len(list(model.parameters())) == len(list(build().parameters())), "H42"
    before = {n: id(p) for n, p in model.named_parameters()}
    with pytest.raises(WrapError, match="a model sharded over ranks on 'cpu' cannot be moved to 'meta2'"):
        model._apply(lambda t: _Elsewhere())
    assert before == {n: id(p) for n, p in model.named_parameters()}
    for call in (lambda: copy.copy(model), lambda: torch.save(model, io.BytesIO())):
        with pytest.raises(WrapError, match="a sharded model cannot be pickled"):
            call()
    assert isinstance(model, TinyLM)
    assert type(model).__name__ == "TinyLM"


class _Elsewhere:
    class device:  # noqa: N801
        type = "meta2"


def dtypes():
    reference = build()
    sharded = shard(copy.deepcopy(reference))
    for move in (lambda m: m.float(), lambda m: m.to(torch.float64), lambda m: m.bfloat16(), lambda m: m.double()):
        move(reference)
        move(sharded)
        assert {p.dtype for p in sharded.parameters()} == {p.dtype for p in reference.parameters()}
        assert all(isinstance(p, DTensor) for p in sharded.parameters())
        tolerance = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 1e-1}[reference.head.weight.dtype]
        for model in (reference, sharded):
            model.zero_grad()
            model(batch(), labels=batch()).backward()
        assert_same_gradients(reference, sharded, tolerance)
    sharded.half()
    assert sharded.model.norm.weight.dtype == torch.float16


def meta_and_one_rank():
    with torch.device("meta"):
        model = TinyLM(build().config)
    shard(model)
    assert all(isinstance(p, DTensor) and p.is_meta for p in model.parameters())
    assert model.head.weight.to_local().shape == ((49, 32) if dist.get_rank() == 0 else (48, 32))
    assert isinstance(model.model.layers[0].mlp.down, RowLinear)


def meta_materializes():
    reference = build()
    with torch.device("meta"):
        model = TinyLM(reference.config).double()
    shard(model)
    model.to_empty(device="cpu")
    source = shard(copy.deepcopy(reference))
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), source.parameters(), strict=True):
            mine.copy_(theirs)
    assert_close(reference(batch()), model(batch()), "output")


def surroundings():
    wrappers_and_moves()
    dtypes()
    meta_and_one_rank()
    meta_materializes()


def test_ties_hold(pool):
    pool.run(ties, world=2)
    pool.run(ties, world=4)


def test_wrappers_moves_and_meta(pool):
    pool.run(surroundings, world=2)


def test_wrong_arguments():
    with pytest.raises(
        ConfigError, match="ModelSharder wants a model, a Policy and a ShardConfig, got int and NoneType"
    ):
        ModelSharder(nn.Linear(2, 2), 3)


def test_one_process_changes_nothing():
    model = build()
    kinds, values = _kinds(model), copy.deepcopy(model.state_dict())
    assert shardcore.shard(model, policy=TinyPolicy, tp=1) is model
    assert ModelSharder(model, TinyPolicy()).shard() is model
    _assert_unchanged(model, kinds, values)
    with pytest.raises(PlanError):
        shardcore.shard(nn.Linear(2, 2), policy=ShardformerStyleForNothing, tp=1)


class ShardformerStyleForNothing(Policy):
    def module_policy(self):
        return {}
