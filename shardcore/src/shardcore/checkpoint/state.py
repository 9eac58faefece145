"""What a checkpoint holds of a model and of its optimizer, under names that no mesh and no wrapper changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardcore.checkpoint.values import decoded, encoded
from shardcore.comm.dtensor_params import is_packed, local_tensor
from shardcore.comm.parts import check_parts, laid_out, split_dim
from shardcore.errors import CheckpointError, ConfigError, NotSupportedError
from shardcore.mesh.context import division_of
from shardcore.nn.optimizers import split_whole_state

# Parts of names that wrappers of modules add.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")

# Entries of a parameter group that are not options.
_NO_OPTIONS = ("params", "param_names")

_SHOWN = 3  # names in a message; the rest is counted


def _clean(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _listed(what: Iterable[str], between: str = ", ", last: str = " and ") -> str:
    found = list(what)
    more = f"{last}{len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return between.join(found[:_SHOWN]) + more


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelState:
    """The state dict of a model, in place."""

    tensors: dict[str, Tensor]  # its own by name, tied ones once
    aliases: dict[str, str]  # further names of tied ones, each with the name that ``tensors`` has
    values: dict[str, Any]  # entries that are no tensors, as modules return them from ``get_extra_state``
    elsewhere: frozenset[str] = frozenset()  # names that other ranks of a pipeline have

    @classmethod
    def of(cls, model: nn.Module) -> ModelState:
        """Return the state of ``model``; refuse one whose state dict is not made of the model's own tensors."""
        for part in model.modules():
            if isinstance(part, FSDPModule):
                part.reshard()  # the root's parameters stay gathered after a forward
        own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        tensors: dict[str, Tensor] = {}
        aliases: dict[str, str] = {}
        values: dict[str, Any] = {}
        seen: dict[int, str] = {}
        for key, value in model.state_dict(keep_vars=True).items():
            name = _clean(key)
            if not isinstance(value, Tensor) or name.endswith("_extra_state"):
                values[name] = value
            elif id(value) not in own:
                raise NotSupportedError(
                    f"the model's state_dict() returns for {name} a tensor that is neither its parameter nor its "
                    "buffer; a hook made it, and it could not be loaded in place. Remove the hook for the checkpoint."
                )
            elif is_packed(value):  # frozen, and read from where the model came from
                seen[id(value)] = name
            elif id(value) in seen:
                aliases[name] = seen[id(value)]
            else:
                seen[id(value)] = name
                tensors[name] = value
        if lost := [_clean(name) for name, p in model.named_parameters() if id(p) not in seen]:
            raise NotSupportedError(
                f"the model's state_dict() leaves out its parameters {_listed(sorted(lost))}, which would not be "
                "saved. Remove the hook that does so for the checkpoint."
            )
        check_parts(tensors)
        division = division_of(model)
        elsewhere = frozenset() if division is None else frozenset(map(_clean, division.names)) - values.keys()
        return cls(tensors=tensors, aliases=aliases, values=values, elsewhere=elsewhere)

    def check(self, metadata: Metadata) -> None:
        """Refuse a checkpoint of another model: say which names, shapes or dtypes differ."""
        entries: dict[str, Any] = metadata.state_dict_metadata
        saved = {key.removeprefix("model."): e for key, e in entries.items() if key.startswith("model.")}
        names = self.tensors.keys() | self.aliases.keys() | self.elsewhere
        problems = []
        if missing := names - saved.keys():
            problems.append(f"it lacks {_listed(sorted(missing))}, which the model has")
        if more := saved.keys() - names:
            problems.append(f"it has {_listed(sorted(more))}, which the model lacks")
        for name, tensor in self.tensors.items():
            if (entry := saved.get(name)) is None:
                continue
            if entry.size != tensor.shape:
                problems.append(f"{name} has the shape {tuple(entry.size)} there and {tuple(tensor.shape)} here")
            elif entry.properties.dtype != tensor.dtype:
                problems.append(f"{name} is {entry.properties.dtype} there and {tensor.dtype} here")
        if problems:
            raise CheckpointError(
                f"the checkpoint is not one of this model: {_listed(problems, '; ', '; and ')}. Nothing was loaded. "
                "Build the model as it was when it was saved, in the same dtype."
            )


def set_values(model: nn.Module, values: Mapping[str, Any]) -> None:
    """Give modules what they returned from ``get_extra_state``, by the names of `ModelState.values`."""
    modules = {_clean(f"{path}."): module for path, module in model.named_modules()}
    for name, value in values.items():
        modules[name.removesuffix("_extra_state") or "."].set_extra_state(value)


def optimizer_state(optimizer: Optimizer, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state of the ``optimizer`` of ``model``.

    Returns:
        The tensors of its state, by ``NAME.KEY``; and as JSON the names of its class and of those that it derives from
        (``kinds``), and for each parameter group (``groups``) its options, and for each parameter in it, by name, which
        tensors and what else its state holds.
    """
    names = _names(optimizer, model)
    split_whole_state(optimizer)
    tensors: dict[str, Tensor] = {}
    groups = []
    for at, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key not in _NO_OPTIONS}
        states = {}
        for parameter in group["params"]:
            name, state = names[id(parameter)], optimizer.state.get(parameter, {})
            own = {key: value for key, value in state.items() if isinstance(value, Tensor)}
            for key, value in own.items():
                _refuse_local(f"{key} of {name}", value, parameter)
                tensors[f"{name}.{key}"] = value
            others = {key: value for key, value in state.items() if key not in own}
            states[name] = {"tensors": list(own), "values": encoded(others, f"the optimizer's state of {name}")}
        groups.append({"options": encoded(options, f"optimizer.param_groups[{at}]"), "parameters": states})
    check_parts(tensors)
    return tensors, {"kinds": _kinds(optimizer), "groups": groups}


def _kinds(optimizer: Optimizer) -> list[str]:
    kinds = type(optimizer).__mro__
    return [kind.__name__ for kind in kinds if issubclass(kind, Optimizer) and kind is not Optimizer]


def _names(optimizer: Optimizer, model: nn.Module) -> dict[int, str]:
    """Return the names of the optimizer's parameters by identity."""
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"optimizer= must be a torch.optim.Optimizer, got a {type(optimizer).__name__}, and a checkpoint holds one "
            "optimizer. Make one with several parameter groups, or save and load each further one in a folder of its "
            "own: save_checkpoint(folder_of_it, model, it). Of a wrapper pass the one inside"
        )
    division = division_of(model)
    first = {} if division is None else division.first_names
    names = {id(parameter): _clean(first.get(name, name)) for name, parameter in model.named_parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if foreign := sum(id(parameter) not in names for parameter in held):
        raise ConfigError(
            f"the optimizer holds {foreign} parameters that are not the model's: it was made before shard(), or for "
            "another model. Make it after shard(), or give it to shard(optimizer=)."
        )
    known = {id(parameter) for parameter in held}
    if others := [key for key in optimizer.state if id(key) not in known]:
        raise NotSupportedError(
            f"this {type(optimizer).__name__} keeps state of {others[0]!r:.80}, which is none of its parameters; such "
            "state cannot be stored. Put it into extra=."
        )
    return names


def _refuse_local(what: str, value: Tensor, parameter: Tensor) -> None:
    """Refuse state of which nobody can tell which part of the whole it is."""
    if not isinstance(parameter, DTensor) or isinstance(value, DTensor) or value.numel() == 1:
        return
    if any(split_dim(placement) is not None for placement in parameter.placements):
        raise NotSupportedError(
            f"{what} is a plain tensor {tuple(value.shape)} beside a parameter that is split over ranks, so it belongs "
            "to this rank's part alone and cannot be stored; use an optimizer whose state is made like its parameters"
        )


def _options(groups: list[dict[str, Any]], held: list[list[str]], *, divided: bool) -> list[dict[str, Any]]:
    """Return the saved options of each parameter group of an optimizer, by the names that it has ``held`` in each.

    Its groups may be others than the saved ones, as long as all parameters of one had the same options. Where they are
    ``divided``, other ranks of a pipeline have the rest of the parameters.

    Raises:
        CheckpointError: they had not, or the checkpoint has other parameters.
    """
    pairs = [(set(own), group["parameters"].keys()) for own, group in zip(held, groups, strict=False)]
    if len(held) == len(groups) and all(own <= saved if divided else own == saved for own, saved in pairs):
        return [decoded(group["options"]) for group in groups]
    options = {name: group["options"] for group in groups for name in group["parameters"]}
    here = {name for group in held for name in group}
    if differing := here - options.keys() if divided else here ^ options.keys():
        raise CheckpointError(
            f"the saved optimizer and this one have other parameters: {_listed(sorted(differing))} are in one only. "
            "Nothing was loaded. Freeze the same parameters and make the optimizer from the same ones."
        )
    found: list[dict[str, Any]] = []
    for at, group in enumerate(held):
        if not group and divided:
            found.append({})  # its parameters are on other ranks
            continue
        if not group or any(options[name] != options[group[0]] for name in group):
            raise CheckpointError(
                f"param_groups[{at}] of this optimizer has parameters of several saved groups with other options (or "
                "none at all); nothing was loaded. Make its groups as they were."
            )
        found.append(decoded(options[group[0]]))
    return found


def restored(
    saved_optimizer: Mapping[str, Any], metadata: Metadata, optimizer: Optimizer, model: nn.Module
) -> tuple[dict[str, Tensor], Callable[[], None]]:
    """Return room for the saved state of ``optimizer``, and what gives it to the optimizer once it is filled."""
    groups = saved_optimizer["groups"]
    if not set(saved_optimizer["kinds"]) & set(_kinds(optimizer)):
        raise CheckpointError(
            f"the saved optimizer is of class {saved_optimizer['kinds'][0]}, and this one is a "
            f"{type(optimizer).__name__}, whose state is another; nothing was loaded. Make the same one, or leave "
            "optimizer= out."
        )
    names = _names(optimizer, model)
    held = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    settings = _options(groups, held, divided=division_of(model) is not None)
    saved = {name: state for group in groups for name, state in group["parameters"].items()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    rooms: dict[str, Tensor] = {}
    state: dict[int, dict[str, Any]] = {}
    for at, parameter in enumerate(parameters):
        name = names[id(parameter)]
        own = decoded(saved[name]["values"])
        for key in saved[name]["tensors"]:
            entry = metadata.state_dict_metadata[f"optimizer.state.{name}.{key}"]
            rooms[f"{name}.{key}"] = own[key] = _room(entry, parameter)
        if own:
            state[at] = own

    def give() -> None:
        counts = iter(range(len(parameters)))
        kept = [
            # What a schedule has added since, and an older release did not have, stays.
            {**group, **options, "params": [next(counts) for _ in group["params"]]}
            for options, group in zip(settings, optimizer.param_groups, strict=True)
        ]
        optimizer.load_state_dict({"state": state, "param_groups": kept})
        _restore_dtypes(optimizer, parameters, state)

    return rooms, give


def _room(entry: Any, parameter: Tensor) -> Tensor:
    """Return a tensor for saved state: laid out as its parameter if it is of the same shape, else whole."""
    dtype = entry.properties.dtype
    if isinstance(parameter, DTensor) and entry.size == parameter.shape:
        return laid_out(torch.empty_like(local_tensor(parameter), dtype=dtype, requires_grad=False), parameter)
    return torch.empty(entry.size, dtype=dtype, device=parameter.device if entry.size == parameter.shape else "cpu")


def _restore_dtypes(optimizer: Optimizer, parameters: list[Tensor], state: Mapping[int, Mapping[str, Any]]) -> None:
    """Undo casts: ``Optimizer.load_state_dict`` gives state the dtype of its parameter, which may be a smaller one."""
    for at, saved in state.items():
        own = optimizer.state[parameters[at]]
        for key, value in saved.items():
            if isinstance(value, Tensor) and key != "step" and own[key].dtype != value.dtype:
                own[key] = value.to(own[key].device)
