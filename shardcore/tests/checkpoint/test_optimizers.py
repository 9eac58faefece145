"""Optimizers of all kinds, groups that were made otherwise, and what of them cannot be saved."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tiny import TinyPolicy, batch, build
from torch import nn
from torch.distributed.tensor import DTensor

import shardcore
from shardcore.checkpoint import Checkpoint
from shardcore.errors import CheckpointError, ConfigError, NotSupportedError
from shardcore.mesh.context import context_of

_KINDS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.01), amsgrad=True, foreach=False),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "named": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, momentum=0.1, centered=True),
}


def step(model, optimizer, seed):
    context = context_of(model)
    ids = batch(seed, rows=4)
    if context is not None and context.sizes.replicas > 1:
        ids = ids.chunk(2)[context.replica]
    model(ids, labels=ids.roll(1, 1)).backward()
    optimizer.step()
    optimizer.zero_grad()


def kinds(folder):
    for name, make in _KINDS.items():
        for fields in ({"tp": 2}, {"tp": 1, "dp": 2}):
            place = f"{folder}/{name}{len(fields)}"
            models = []
            for seed in (0, 7):
                model = shardcore.shard(build(seed), policy=TinyPolicy, **fields)
                optimizer = make(model.named_parameters() if name == "named" else model.parameters())
                step(model, optimizer, seed)
                models.append((model, optimizer))
            (model, optimizer), (other, again) = models
            shardcore.save_checkpoint(place, model, optimizer)
            shardcore.load_checkpoint(place, other, again)
            for one in models:
                step(*one, 1)
            for (key, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
                assert torch.equal(local(mine), local(theirs)), (name, key)
                for what, value in optimizer.state[mine].items():
                    got = again.state[theirs][what]
                    assert type(got) is type(value), (name, what)
                    assert got is value is None or torch.equal(local(got), local(value)), (name, what)


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*lr as a Tensor.*:UserWarning")
def test_kinds(pool, tmp_path):
    pool.run(kinds, str(tmp_path))


def linear(*groups):
    """Return a model and an AdamW with a group for each list of names."""
    torch.manual_seed(len(groups))
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    named = dict(model.named_parameters())
    made = [{"params": [named[name] for name in names], **options} for names, options in groups]
    optimizer = torch.optim.AdamW(made, lr=1.0)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return model, optimizer


_WEIGHTS, _BIASES = ["0.weight", "1.weight"], ["0.bias", "1.bias"]


def test_groups_that_are_made_otherwise(tmp_path):
    shardcore.save_checkpoint(tmp_path, *linear((_WEIGHTS, {"lr": 0.1}), (_BIASES, {"lr": 0.2})))
    for order in ([_BIASES, _WEIGHTS], [_BIASES, ["1.weight"], ["0.weight"]]):
        model, optimizer = linear(*((names, {}) for names in order))
        shardcore.load_checkpoint(tmp_path, model, optimizer)
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates == [0.2, *[0.1] * (len(order) - 1)]
        saved = Checkpoint(tmp_path)
        for name, parameter in model.named_parameters():
            wanted = saved.read(f"optimizer.state.{name}.exp_avg")
            assert torch.equal(optimizer.state[parameter]["exp_avg"], wanted)
    for groups, words in (
        ([(_WEIGHTS + _BIASES, {})], "parameters of several saved groups"),
        ([(_WEIGHTS, {})], "0.bias, 1.bias are in one only"),
    ):
        model, optimizer = linear(*groups)
        with pytest.raises(CheckpointError, match=words):
            shardcore.load_checkpoint(tmp_path, model, optimizer)


def test_state_of_a_larger_dtype_stays(tmp_path):
    def made():
        model = nn.Linear(3, 3, dtype=torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(3, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = made()
    state = optimizer.state[model.weight]
    state["exp_avg"] = state["exp_avg"].float() + 1e-5
    shardcore.save_checkpoint(tmp_path, model, optimizer)
    other, again = made()
    shardcore.load_checkpoint(tmp_path, other, again)
    assert torch.equal(again.state[other.weight]["exp_avg"], state["exp_avg"])
    assert again.state[other.weight]["exp_avg"].dtype == torch.float32


class LocalState(torch.optim.SGD):
    """Keeps a tensor of this rank's part."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["part"] = torch.zeros_like(local(parameter))


def state_of_a_part(folder):
    model = shardcore.shard(build(), policy=TinyPolicy, tp=2)
    optimizer = LocalState(model.parameters())
    optimizer.step()
    with pytest.raises(NotSupportedError, match=r"part of model.embed.weight is a plain tensor"):
        shardcore.save_checkpoint(folder, model, optimizer)
    dist.barrier()


def test_state_of_a_part_is_refused(pool, tmp_path):
    pool.run(state_of_a_part, str(tmp_path))


def test_parameters_of_another_model(tmp_path):
    with pytest.raises(ConfigError, match="2 parameters that are not the model's"):
        shardcore.save_checkpoint(tmp_path, nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters()))


def test_state_of_no_parameter(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state["all"]["step"] = 1
    with pytest.raises(NotSupportedError, match="keeps state of 'all'"):
        shardcore.save_checkpoint(tmp_path, model, optimizer)


class WithExtra(nn.Linear):
    extra = (1, 2)

    def get_extra_state(self):
        return {"extra": self.extra}

    def set_extra_state(self, state):
        self.extra = state["extra"]


@pytest.mark.parametrize("make", [lambda: WithExtra(2, 2), lambda: nn.Sequential(nn.Linear(2, 2), WithExtra(2, 2))])
def test_extra_state_and_wrappers(tmp_path, make):
    model = make()
    (model if isinstance(model, WithExtra) else model[1]).extra = (3, [4])
    shardcore.save_checkpoint(tmp_path, torch.compile(model, backend="eager"))
    again = make()
    shardcore.load_checkpoint(tmp_path, again)
    assert (again if isinstance(again, WithExtra) else again[1]).extra == (3, [4])
    for mine, theirs in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_compiled_parts_have_the_names_of_the_whole(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1] = torch.compile(model[1], backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    sum(p.sum() for p in model.parameters()).backward()
    optimizer.step()
    path = shardcore.save_checkpoint(tmp_path, model, optimizer)
    assert sorted(Checkpoint(path).names()) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    shardcore.load_checkpoint(path, plain, torch.optim.SGD(plain.parameters(), momentum=0.9))
    assert torch.equal(plain[1].weight, model[1].weight)


@pytest.mark.parametrize("given", [list, tuple, lambda found: {"one": found[0]}])
def test_several_optimizers(tmp_path, given):
    model = nn.Linear(2, 2)
    optimizer = given([torch.optim.SGD([model.weight]), torch.optim.SGD([model.bias])])
    message = (
        "and a checkpoint holds one optimizer. Make one with several parameter groups, or save and load each further"
    )
    with pytest.raises(ConfigError, match=message):
        shardcore.save_checkpoint(tmp_path, model, optimizer)
    assert not [*tmp_path.iterdir()]


def test_moments_of_another_optimizer(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    shardcore.save_checkpoint(tmp_path, model, optimizer)
    with pytest.raises(CheckpointError, match="is of class SGD, and this one is a AdamW"):
        shardcore.load_checkpoint(tmp_path, model, torch.optim.AdamW(model.parameters()))
