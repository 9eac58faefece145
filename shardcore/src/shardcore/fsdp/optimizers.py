"""Optimizers that were made before the model was sharded."""

from __future__ import annotations

import gc
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardcore.errors import ConfigError, NotSupportedError, StaleOptimizerWarning
from shardcore.nn.optimizers import STALE


def check_optimizer(optimizer: Optimizer, names: dict[int, str]) -> None:
    """Refuse an optimizer that cannot be re-pointed: ``names`` has the parameters of its model by identity."""
    if not isinstance(optimizer, Optimizer) or not isinstance(getattr(optimizer, "param_groups", None), list):
        raise ConfigError(
            f"optimizer= must be a torch.optim.Optimizer with parameter groups, got a {type(optimizer).__name__}; pass "
            "the optimizer inside of a wrapper, or make it after shard()"
        )
    # By name: its module cannot be imported without a warning of torch's.
    if any(cls.__name__ == "ZeroRedundancyOptimizer" for cls in type(optimizer).__mro__):
        raise NotSupportedError(
            "optimizer= is a ZeroRedundancyOptimizer, which has divided the parameters among the ranks already; give "
            "shard() a plain optimizer and dp_shard_size, which shards optimizer state too"
        )
    if optimizer.state:
        raise NotSupportedError(
            f"this {type(optimizer).__name__} holds state already, which cannot be re-pointed. Make another one after "
            "shard(), and give it the state: new.load_state_dict(old.state_dict()) splits it as the parameters are."
        )
    foreign = sum(id(p) not in names for group in optimizer.param_groups for p in group["params"])
    if foreign:
        raise ConfigError(
            f"optimizer= holds {foreign} parameters that are not the model's; pass the optimizer that was made from "
            "this model's parameters, or make it after shard()"
        )


def repoint(optimizer: Optimizer, names: dict[int, str], parameters: dict[str, nn.Parameter], *, divided: bool) -> None:
    """Let an optimizer of the old parameters, ``names`` by identity, step the new ``parameters`` of these names.

    Its groups stay, in place. If it is ``divided``, other ranks of a pipeline have the rest; groups may be empty.
    """
    held = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    missing = [name for name in held if name not in parameters]
    if missing and not divided:
        raise ConfigError(
            f"optimizer= holds {missing[0]}, which the model lost while it was sharded; make it after shard()"
        )
    for group in optimizer.param_groups:
        # The list itself is kept: some optimizers hold a second reference to it.
        old = [names[id(p)] for p in group["params"]]
        group["params"][:] = [parameters[name] for name in old if name in parameters]


def held_elsewhere(model: nn.Module) -> dict[int, str]:
    """Return the names of the parameters that more than the modules of ``model`` refer to, by identity.

    No weak references are held to find out later: a parameter that has one cannot be swapped (`torch.utils`).
    """
    alone = nn.Module()
    alone.register_parameter("one", nn.Parameter(torch.empty(0)))
    ((_, own),) = _references(alone)
    modules = Counter(key for key, _ in _references(model))
    held = {key for key, number in _references(model) if number > own + modules[key] - 1}
    return {id(p): name for name, p in model.named_parameters() if id(p) in held}


def _references(model: nn.Module) -> Iterator[tuple[int, int]]:
    """Yield the identity of each parameter of each module and the number of references that it has here."""
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                yield id(parameter), sys.getrefcount(parameter)


def tied_outside(model: nn.Module) -> dict[str, str]:
    """Return which parameters of ``model`` modules outside of it hold too: their names here, with class and name there.

    These would go on with the old parameters, and what was tied would be trained apart.
    """
    if held_elsewhere(model):
        gc.collect()  # what nobody can use any more holds nothing
    names = held_elsewhere(model)
    if not names:
        return {}
    own = {id(module._parameters) for module in model.modules()}
    held = [parameter for parameter in model.parameters() if id(parameter) in names]
    found = {}
    for mapping in gc.get_referrers(*held):
        if type(mapping) is not dict or id(mapping) in own:
            continue
        for leaf, value in list(mapping.items()):
            if id(value) in names and (owner := _module_of(mapping)) is not None:
                found[names[id(value)]] = f"{type(owner).__name__}.{leaf}"
    return found


def _module_of(parameters: dict[str, Any]) -> nn.Module | None:
    """Return the module whose parameters these are."""
    for holder in gc.get_referrers(parameters):
        of = gc.get_referrers(holder) if type(holder) is dict else [holder]
        for module in of:
            if isinstance(module, nn.Module) and module.__dict__.get("_parameters") is parameters:
                return module
    return None


def warn_of_stale_optimizers(held: dict[int, str], model: nn.Module) -> None:
    """Warn of every optimizer that still holds one of the old parameters, of those that were `held_elsewhere`.

    What an optimizer holds is alive, so that no parameter that ``model`` has now can be in its place.
    """
    now = {id(parameter) for parameter in model.parameters()}
    names = {key: name for key, name in held.items() if key not in now}
    if not names:  # no need to look through all objects of the process
        return
    kinds = _subclasses(Optimizer)
    # An object refers to its class, and the collector finds that faster than we could look through all objects.
    for candidate in gc.get_referrers(*kinds):
        if type(candidate) not in kinds:
            continue
        old = [names[id(p)] for g in candidate.param_groups for p in g["params"] if id(p) in names]
        if old:
            setattr(candidate, STALE, old[0])
            warnings.warn(
                f"{type(candidate).__name__} was made before shard() and still holds {len(old)} of the old "
                f"parameters (first: {old[0]}): its steps would change nothing, and are refused. Make it after "
                "shard(), or pass it as shard(..., optimizer=optimizer).",
                StaleOptimizerWarning,
                stacklevel=3,  # where `shardcore.shard` was called
            )


def _subclasses(cls: type) -> set[type]:
    """Return ``cls`` and every class below it."""
    return {cls}.union(*map(_subclasses, cls.__subclasses__()))
