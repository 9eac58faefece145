"""Modules that somebody puts among the parallel ones after shard() are refused, where they cannot be right."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import TinyPolicy, batch, build, shard
from torch import Tensor, nn

import shardcore
from shardcore.errors import WrapError
from shardcore.styles import region, sequence
from shardcore_testing.parity import assert_close, assert_same_gradients


class Lora(nn.Module):
    """A low-rank adapter, as people write it by hand."""

    def __init__(self, base: nn.Module, rows: int, columns: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.full((2, columns), 0.1, dtype=torch.float64))
        self.up = nn.Parameter(torch.full((rows, 2), 0.1, dtype=torch.float64))

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = self.base(x, *args, **kwargs)
        return out + x.to(out.dtype) @ self.down.T @ self.up.T if x.is_floating_point() else out


class Passing(nn.Module):
    """A wrapper that does nothing."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base(*args, **kwargs)


class LooseMlp(TinyPolicy):
    """The first MLP linear is entered by itself, so that no module stands for the region."""

    def module_policy(self) -> Any:
        rows = super().module_policy()
        mlp = region(col=("mlp.gate", "mlp.up"), row="mlp.down")
        return {**rows, "Block": [*rows["Block"][:2], mlp, *rows["Block"][3:]]}


class Tokens(TinyPolicy):
    def module_policy(self) -> Any:
        rows = super().module_policy()
        return {**rows, "Decoder": [*rows["Decoder"], sequence(scatter="layers[0]", gather="norm")]}


def _put(path: str, make: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, make(model.get_submodule(path)))

    return change


def _parameter(path: str) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        model.get_submodule(path).register_parameter("own", nn.Parameter(torch.ones(1, dtype=torch.float64)))

    return change


ATTENTION, MLP = "model.layers.1.attention", "model.layers.1.mlp"
REFUSED: dict[str, tuple[str, Callable[[nn.Module], None]]] = {
    "LoRA on queries": (f"{ATTENTION}.q_proj", _put(f"{ATTENTION}.q_proj", lambda m: Lora(m, 16, 32))),
    "LoRA on the output": (f"{ATTENTION}.o_proj", _put(f"{ATTENTION}.o_proj", lambda m: Lora(m, 32, 16))),
    "a sequence around a row linear": (f"{MLP}.down", _put(f"{MLP}.down", lambda m: nn.Sequential(m, nn.Identity()))),
    "a wrapper around a column linear": (f"{MLP}.up", _put(f"{MLP}.up", Passing)),
    "another linear": (f"{MLP}.gate", _put(f"{MLP}.gate", lambda m: nn.Linear(32, 22).double())),
    "another module between": (f"{MLP}.drop", _put(f"{MLP}.drop", lambda m: nn.PReLU().double())),
    "what looks at several elements": (f"{MLP}.drop", _put(f"{MLP}.drop", lambda m: nn.Softmax(-1))),
    "a wrapper around norms of heads": (f"{ATTENTION}.q_norm", _put(f"{ATTENTION}.q_norm", Passing)),
    "the embedding": ("model.embed", _put("model.embed", Passing)),
    "the head": ("head", _put("head", lambda m: Lora(m, 97, 32))),
    "a parameter in a region": (f"{ATTENTION}.own", _parameter(ATTENTION)),
    "a parameter in a linear": (f"{ATTENTION}.q_proj.own", _parameter(f"{ATTENTION}.q_proj")),
}


def _refused(name: str, policy: Any) -> None:
    model = shard(build(), policy)
    ids = batch()
    wanted = model(ids).detach()
    place, change = REFUSED[name]
    broken = copy.deepcopy(model)
    change(broken)
    for _ in range(2):
        with pytest.raises(WrapError, match=f"{place} .*put back what was there") as caught:
            broken(ids)
    assert "TinyLM" in str(caught.value)
    assert_close(wanted, model(ids), "the model that was copied", 1e-12)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(pool, name):
    pool.run(_refused, name, TinyPolicy, world=2)


def test_refused_where_no_module_stands_for_the_region(pool):
    pool.run(_refused, "a wrapper around a column linear", LooseMlp, world=2)


def _put_back() -> None:
    model = shard(build())
    ids = batch()
    wanted = model(ids).detach()
    linear = model.model.layers[0].mlp.up
    model.model.layers[0].mlp.up = Passing(linear)
    with pytest.raises(WrapError):
        model(ids)
    model.model.layers[0].mlp.up = linear
    assert_close(wanted, model(ids), "after putting it back", 1e-12)


def test_put_back(pool):
    pool.run(_put_back, world=2)


ALLOWED: dict[str, Callable[[nn.Module], None]] = {
    "a layer is wrapped": _put("model.layers.0", Passing),
    "a layer is replaced": _put("model.layers.0", lambda m: nn.Identity()),
    "a layer is deleted": lambda model: model.model.layers.__delitem__(0),
    "layers change places": lambda model: model.model.layers.extend([model.model.layers.pop(0)]),
    "a region is wrapped": _put(MLP, Passing),
    "an adapter around a region": _put(MLP, lambda m: Lora(m, 32, 32)),
    "another dropout outside of regions": _put("model.layers.0.drop", lambda m: nn.Identity()),
    "another activation inside of a region": _put(f"{MLP}.drop", lambda m: nn.Tanh()),
    "a norm is wrapped": _put("model.norm", Passing),
}


def _allowed(name: str) -> None:
    native = build()
    sharded = shard(copy.deepcopy(native))
    for model in (native, sharded):
        model(batch())
        ALLOWED[name](model)
        for _ in range(2):
            model(batch(), labels=batch(1)).backward()
    assert_same_gradients(native, sharded)


@pytest.mark.parametrize("name", ALLOWED)
def test_allowed(pool, name):
    pool.run(_allowed, name, world=2)


def _tokens() -> None:
    for path, change in {
        "model.layers.1.down": _put("model.layers.1", lambda m: Lora(m, 32, 32)),
        "model.layers.0.norm1.down": _put("model.layers.0.norm1", lambda m: Lora(m, 32, 32)),
    }.items():
        model = shard(build(), Tokens, enable_sequence_parallelism=True)
        change(model)
        with pytest.raises(WrapError, match=rf"{path} .* one rank's tokens"):
            model(batch())


def test_parameters_that_see_the_tokens_of_one_rank(pool):
    pool.run(_tokens, world=2)


def _replicas(tp: int) -> None:
    model = shardcore.shard(build(), policy=TinyPolicy, tp=tp, dp=2)
    model(batch())
    model.model.layers[0].mlp = nn.Sequential(model.model.layers[0].mlp, Lora(nn.Identity(), 32, 32))
    with pytest.raises(WrapError, match=r"mlp\.1\.down .*nobody averages its gradient over the 2 data-parallel"):
        model(batch())
    added = model.model.layers[0].mlp[1].requires_grad_(False)
    model(batch())
    added.requires_grad_()
    with pytest.raises(WrapError, match="nobody averages"):
        model(batch())


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view")
@pytest.mark.parametrize("tp", [1, 2])
def test_parameters_that_nobody_averages(pool, tp):
    pool.run(_replicas, tp, world=2 * tp)
