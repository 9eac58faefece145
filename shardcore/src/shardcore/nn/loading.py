"""``load_state_dict`` of a sharded model: full tensors, as an unsharded model has them, and matching DTensors.

A hook before the loading of each module turns every full tensor into the DTensor of its parameter, by cutting out this
rank's part; nothing is sent. All ranks have to load the same tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import ReferenceType, ref

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardcore.comm.dtensor_params import local_tensor, spec_of
from shardcore.comm.parts import part_of, split_dim
from shardcore.errors import WrapError
from shardcore.mesh.context import division_of


def take_full_tensors(model: nn.Module) -> None:
    """Let ``load_state_dict`` of ``model`` and all its modules accept full tensors for DTensor parameters."""
    for module in model.modules():
        hooks: list[Any] = list(module._load_state_dict_pre_hooks.values())
        taken = [hook.hook for hook in hooks if isinstance(getattr(hook, "hook", None), _TakeFull)]
        for hook in taken:  # a part that was made alone and is in a model by now
            hook.root = ref(model)
        if not taken:
            module.register_load_state_dict_pre_hook(_TakeFull(ref(model)))


class _TakeFull:
    """Called with the state before one module loads its own tensors from it."""

    def __init__(self, root: ReferenceType[nn.Module]) -> None:
        self.root = root

    def __deepcopy__(self, memo: dict[int, Any]) -> _TakeFull:
        root = memo.get(id(self.root()))
        return _TakeFull(self.root if root is None else ref(root))

    def __call__(
        self,
        module: nn.Module,
        state: dict[str, Any],
        prefix: str,
        metadata: Mapping[str, Any],
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        if metadata.get("assign_to_params_buffers", False):
            return
        root = self.root()
        if module is root or not prefix:
            # FSDP2 leaves the root's parameters gathered after a forward; its own hook comes after this one.
            for part in module.modules() if root is None else root.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()
            _refuse_others_parts(module, state, prefix)
            if root is not None:
                _leave_to_others(root, module, state, prefix, missing)
        for name, own in (*module._parameters.items(), *module._buffers.items()):
            given = state.get(prefix + name)
            if isinstance(own, DTensor) and isinstance(given, Tensor) and given.shape == own.shape:
                state[prefix + name] = _fitting(given, own)


def _fitting(given: Tensor, own: DTensor) -> Tensor:
    if not isinstance(given, DTensor):
        return part_of(given, own)
    alike = given.placements == own.placements and given.device_mesh.mesh.shape == own.device_mesh.mesh.shape
    if given.device_mesh == own.device_mesh or not alike:
        return given  # torch brings it to the placements of its own
    # The same part on another mesh of the same form: that of another replica, or of an earlier process.
    local, like = local_tensor(given), spec_of(own)
    return DTensor.from_local(
        local, like.mesh, like.placements, run_check=False, shape=own.shape, stride=tuple(own.stride())
    )


def _refuse_others_parts(module: nn.Module, state: Mapping[str, Any], prefix: str) -> None:
    """Refuse a DTensor in ``state`` that is another rank's part: from a file that one rank wrote and all read."""
    for name, own in (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)):
        given = state.get(prefix + name)
        if not isinstance(own, DTensor) or not isinstance(given, DTensor):
            continue
        here, there = own.device_mesh.get_coordinate(), given.device_mesh.get_coordinate()
        splits = [at for at, placement in enumerate(given.placements) if split_dim(placement) is not None]
        if here is None or there is None or len(here) != len(there) or any(here[at] != there[at] for at in splits):
            raise WrapError(
                f"{prefix}{name} in this state dict is the part of the rank at {there} on the mesh, and this rank is "
                f"at {here}: one rank's torch.save(model.state_dict()) was loaded on several ranks. Nothing was "
                "loaded. Save a state dict that all can load with torch.distributed.checkpoint.state_dict."
                "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)), called on every rank, "
                "or with model.save_pretrained(folder); or write one file for each rank."
            )


def _leave_to_others(
    root: nn.Module, module: nn.Module, state: dict[str, Any], prefix: str, missing: list[str]
) -> None:
    """Take from ``state`` what other ranks of a pipeline hold of ``module``; of a whole state, note what it lacks."""
    division = division_of(root)
    if division is None:
        return
    path = next(f"{name}." if name else "" for name, part in root.named_modules() if part is module)
    whole = {prefix + name.removeprefix(path) for name in division.names if name.startswith(path)}
    others = whole - module.state_dict(prefix=prefix, keep_vars=True).keys()
    if others & state.keys():
        missing += sorted(others - state.keys())
    for name in others:
        state.pop(name, None)
