"""What is done before each step of an optimizer on the parameters of sharded models.

- Optimizers that use operations which DTensor lacks are refused, with the words what to use. They would fail in the
  middle of a step, with torch's words about placements or "mixed torch.Tensor and DTensor". `shardcore_loop`
  hands them plain tensors.
- Optimizers that were made before the model was sharded are refused: what they step is not the model's any more.
- State of whole parameters, which ``optimizer.load_state_dict`` keeps as an unsharded training has saved it, is split
  as the parameters are. torch calls no hook of the process when it loads, so that the next step is when to do it.
- Fused steps go over the parts: every element is treated by itself. torch has no such steps of SGD and Adagrad for
  DTensors, and those of Adam cost it 10 us of the host's time for each parameter.
- An infinite gradient that one rank alone has makes all ranks leave out the step. `torch.amp.GradScaler` unscales all
  gradients of an optimizer in one call. For DTensors torch (2.11 to 2.14) brings what a rank found to the others along
  the axes that split the *first* gradient. If that one is replicated (a norm, a class token) they are not told.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardcore._private import SCALING, STEPS
from shardcore.comm.dtensor_params import local_tensor, spec_of
from shardcore.comm.parts import part_of
from shardcore.errors import ConfigError, NotSupportedError
from shardcore.nn.handlers import Undo, handle, natively, overloads
from shardcore.nn.libraries import ask, library_of
from shardcore.nn.living import owns

_WHOLE, _PARTS = "WholeTensors", "LocalParts"

#: By library and class, or for its other classes: what of `shardcore_loop` to use. Rprop treats every element by
#: itself, and so do those of bitsandbytes that keep states of 32 bits.
_UNABLE = {
    ("bitsandbytes", ""): _PARTS,
    ("bitsandbytes", "LAMB"): _WHOLE,
    ("bitsandbytes", "LARS"): _WHOLE,
    ("torch", "Adafactor"): _WHOLE,
    ("torch", "LBFGS"): _WHOLE,
    ("torch", "Rprop"): _PARTS,
}

#: What else looks at more than single elements; DTensors give these what they look at.
_AT_WHOLES = {("torch", "Muon")}

#: On an optimizer that was made before the model was sharded: the name of a parameter that the model had then.
STALE = "_shardcore_stale"


def what_to_use(optimizer: Any) -> str | None:
    """Return why ``optimizer`` cannot step DTensors and what can, or None where nothing is known against it."""
    wanted, option = _wanted(optimizer)
    if wanted is None:
        return None
    kind = type(optimizer)
    return (
        f"{kind.__module__}.{kind.__qualname__}{option} uses operations that the parameters of a sharded model lack "
        f"(they are DTensors), and would fail in its first step. Use shardcore_loop.{wanted}({kind.__name__}, "
        "model.parameters(), ...), of shardcore-loop, which steps it on plain tensors and gives what it gives the "
        "unsharded model; or another optimizer, such as AdamW"
    )


def refuse_stale(optimizer: Any) -> None:
    """Raise a `ConfigError` for an optimizer of parameters that a sharded model has no longer."""
    old = getattr(optimizer, STALE, None)
    if old is not None and not any(True for _ in _sharded(optimizer)):
        raise ConfigError(
            f"this {type(optimizer).__name__} was made before shard() and holds parameters that the model had then "
            f"(first: {old}): its steps would change nothing. Make it after shard(), or pass it as "
            "shard(..., optimizer=optimizer)"
        )


def looks_at_wholes(optimizer: Any) -> bool:
    """Tell whether ``optimizer`` is known to look at more of a tensor than one element at a time."""
    library, name = library_of(optimizer), type(optimizer).__name__
    known = (library, name) in _AT_WHOLES or name in (ask(library, "OPTIMIZERS_AT_WHOLES") or ())
    return known or _wanted(optimizer)[0] == _WHOLE


def _wanted(optimizer: Any) -> tuple[str | None, str]:
    """Return what of `shardcore_loop` can step it, None where it needs none, and the option that needs it."""
    library, name = library_of(optimizer), type(optimizer).__name__
    if library == "bitsandbytes" and getattr(getattr(optimizer, "args", None), "optim_bits", None) == 8:
        return _WHOLE, ""  # a state shares its scale with its neighbours, which are others in a part
    if (needs := ask(library, "needs_of_optimizer")) is not None:
        found: tuple[str | None, str] = needs(optimizer)
        return found
    return _UNABLE.get((library, name), _UNABLE.get((library, ""))), ""


def prepare_steps() -> Undo:
    """Look at every optimizer of sharded models before its steps."""
    return register_optimizer_step_pre_hook(_prepare).remove


def _prepare(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    refuse_stale(optimizer)
    words = what_to_use(optimizer)
    if (words or _has_whole_state(optimizer)) and owns(*_sharded(optimizer)):
        if words:
            raise NotSupportedError(words)
        split_whole_state(optimizer)


def split_whole_state(optimizer: Optimizer) -> None:
    """Let state of whole parameters be this rank's parts of it. All ranks have loaded the same, so nothing is sent."""
    if not _has_whole_state(optimizer):
        return
    for parameter in _sharded(optimizer):
        state = optimizer.state.get(parameter, {})
        for key, value in state.items():
            if _is_plain(value) and value.shape == parameter.shape:
                # A part that is a view would hold the whole.
                state[key] = part_of(value, parameter).clone()


def _has_whole_state(optimizer: Optimizer) -> bool:
    """Tell whether its state is of whole parameters; the first parameter whose part has another shape shows it.

    Plain tensors of the shapes of the parts are an optimizer's own matter, which looks at parts by itself. Where every
    part is a whole, the optimizers of torch alone are known to keep state that is as the parameters are.
    """
    in_doubt = False
    for parameter in _sharded(optimizer) if optimizer.state else ():
        for value in optimizer.state.get(parameter, {}).values():
            if isinstance(value, DTensor):
                return False
            if _is_plain(value):
                if local_tensor(parameter).shape != parameter.shape:
                    return value.shape == parameter.shape
                in_doubt |= value.shape == parameter.shape
    return in_doubt and type(optimizer).__module__.startswith("torch.")


def _is_plain(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and not isinstance(value, DTensor) and value.ndim > 0


def _sharded(optimizer: Optimizer) -> Iterator[DTensor]:
    for group in optimizer.param_groups:
        yield from (parameter for parameter in group["params"] if isinstance(parameter, DTensor))


def step_parts() -> Undo:
    """Let fused steps of sharded models go over the parts."""
    return handle(overloads(*(f"_fused_{name}_" for name in ("adagrad", "adam", "adamw", "sgd"))), _step, STEPS)


def _step(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # What is laid out in another way than its parameter, such as a gradient that is still partial, is torch's matter.
    layouts = [[t.placements for t in listed if isinstance(t, DTensor)] for listed in args[:2]]
    if layouts[0] != layouts[1] or not owns(args[0][0]):
        return natively(operation, args, kwargs)
    parts = [[local_tensor(t) for t in given] if isinstance(given, list | tuple) else given for given in args]
    return operation(*parts, **kwargs)


def find_inf_on_all_ranks() -> Undo:
    """Let gradient scalers of sharded models bring what they found along every axis that splits any gradient."""
    return handle([torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default], _unscale, SCALING)


def _unscale(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    grads, found, factor = args
    if not owns(*grads):
        natively(operation, args, kwargs)
        return
    operation([local_tensor(grad) for grad in grads], found, factor)
    told = set()
    for grad in grads:
        spec = spec_of(grad)
        for axis, placement in enumerate(() if spec is None else spec.placements):
            group = spec.mesh.get_group(axis)
            if not placement.is_replicate() and group.group_name not in told:
                told.add(group.group_name)
                dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
