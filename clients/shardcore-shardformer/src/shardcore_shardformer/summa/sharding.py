"""Dividing a model over a square of ranks, and running it there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_leaves, tree_map_only

from shardcore.agree.agreement import Report, agree, agreement
from shardcore.agree.fingerprint import checksum, model_items, tensor_items
from shardcore.apply.launch import world_size
from shardcore.apply.shardable import check_model, refuse_packed, refuse_sharded
from shardcore.errors import PlanError, Problem
from shardcore.mesh.axes import current_device, device_type_of
from shardcore.nn import ParallelMixin
from shardcore.nn.mixin import add_mixin
from shardcore_shardformer.config import ShardConfig, square_root
from shardcore_shardformer.summa.functions import Divided, has_divided, refusal, whole
from shardcore_shardformer.summa.products import COLUMNS, ROWS, layout

Model = TypeVar("Model", bound=nn.Module)

_LAYERS = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm)
_CONTAINERS = (nn.ParameterList, nn.ParameterDict)
_FIRST = 3  # calls whose inputs are compared in any case


@dataclass
class Square:
    """What the modules of one model share.

    Attributes:
        config: how it is divided.
        running: the modules whose forward is under way, outermost first.
        calls: how often the model was called.
    """

    config: ShardConfig
    running: list[str] = field(default_factory=list)
    calls: int = 0


class InSquare(ParallelMixin):
    """A module of a model whose tensors are divided over a square of ranks.

    The outermost one that is called takes and returns whole tensors; within it they are divided.
    """

    keeps_name: ClassVar[bool] = True

    _square_path: str
    _square: Square

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the native forward on divided tensors.

        Raises:
            NotSupportedError: it calls a function that is not served on them.
            AgreementError: ranks were called with different inputs.
        """
        running = self._square.running
        running.append(f"{self._square_path or 'the model'} ({type(self).__name__})")
        try:
            return super().forward(*args, **kwargs) if len(running) > 1 else self._outermost(args, kwargs)
        finally:
            running.pop()

    def _outermost(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.is_autocast_enabled(device_type_of()):
            raise refusal("torch.autocast (cast the model: model.to(torch.bfloat16))", self._square.running[-1])
        # A block that is computed again in a backward is given divided tensors, and was expected to return them.
        divided = has_divided((args, kwargs))
        if not divided:
            self._compare(args, kwargs)
        with Divided(lambda: self._square.running[-1]):
            out = super().forward(*args, **kwargs)
        return out if divided or self._square.config.parallel_output else tree_map_only(DTensor, whole, out)

    def _compare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Compare tensors that ranks were called with, in the first calls and then now and then."""
        every, number = self._square.config.check_inputs_every, self._square.calls
        self._square.calls = number + 1
        if every and (number < _FIRST or number % every == 0):
            found = [value for value in tree_leaves((args, dict(kwargs))) if isinstance(value, Tensor)]
            # What ranks have computed by themselves may differ in its last bits.
            told = [(str(x.dtype), *x.shape, "computed" if x.requires_grad else checksum(x)) for x in found]
            agree(Report(items=tuple((f"tensor {i} of the inputs", str(what)) for i, what in enumerate(told))))


def shard_in_square(model: Model, config: ShardConfig) -> Model:
    """Divide ``model`` over all ranks, a square, in place; every rank holds the same weights, and makes the call.

    Raises:
        ConfigError: the number of ranks is no square.
        PlanError: the model has modules that are not served, or nothing to divide.
        AgreementError: ranks hold different models; nothing was changed.
    """
    with agreement() as own:
        check_model(model)
        refuse_sharded(model)
        refuse_packed(model)
        q = square_root(world_size(config))
        if problems := list(_problems(model, q)):
            raise PlanError(f"{type(model).__name__} over {q} x {q} ranks", problems)
        about, values = tensor_items(model)
        own.report = Report(items=(*model_items(model), *about, *values))
    mesh = init_device_mesh(device_type_of(), (q, q), mesh_dim_names=("rows", "columns"))
    square = Square(config)
    device, made = current_device(mesh.device_type), dict[nn.Parameter, nn.Parameter]()
    for path, module in list(model.named_modules()):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if parameter not in made:  # tied ones stay one
                    made[parameter] = _placed(parameter, mesh, device)
                module._parameters[name] = made[parameter]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
        if type(module).forward is not nn.Module.forward:  # which containers do not have
            add_mixin(module, InSquare)
            module.__dict__.update(_square_path=path, _square=square)
    return model


def _placed(parameter: nn.Parameter, mesh: DeviceMesh, device: torch.device) -> nn.Parameter:
    placements, part = layout(mesh, parameter.shape), parameter.detach()
    for axis in (ROWS, COLUMNS):
        if isinstance(lies := placements[axis], Shard):
            part = part.chunk(mesh.size(axis), lies.dim)[mesh.get_local_rank(axis)]
    part = part.to(device, copy=True, memory_format=torch.contiguous_format)
    return nn.Parameter(DTensor.from_local(part, mesh, placements, run_check=False), parameter.requires_grad)


def _problems(model: nn.Module, q: int) -> Iterator[Problem]:
    """Yield what keeps ``model`` from running on q x q ranks."""
    for path, module in model.named_modules():
        kind, own = type(module).__name__, list(module.parameters(recurse=False))
        of_torch = any(
            base.__module__.startswith("torch.nn.") for base in type(module).__mro__ if base is not nn.Module
        )
        if own and of_torch and not isinstance(module, _LAYERS + _CONTAINERS):
            yield _problem(
                path,
                f"a {kind} is not served: its parameters are those of no linear, embedding or norm over features",
                "use tensor_parallel_mode='1d', or write it with torch.nn.Linear (attention too, by heads)",
            )
        if "forward" in vars(module):
            yield _problem(path, f"this {kind} has a forward of its own on the instance", "set it on a subclass")
        if any(parameter.is_meta for parameter in own):
            yield _problem(path, "its parameters are on meta, without values", "give them values first")
    matrices = [parameter.shape for parameter in model.parameters() if parameter.ndim == 2]
    if not any(rows % q == 0 and columns % q == 0 for rows, columns in matrices):
        yield _problem(
            "",
            f"none of its {len(matrices)} matrices has two sizes that {q} divides: {[*map(tuple, matrices)]}",
            f"choose sizes that are multiples of {q}; single ones that are not stay whole along one axis",
        )


def _problem(where: str, what: str, todo: str) -> Problem:
    return Problem(where=where, rule="ShardConfig.tensor_parallel_mode='2d'", what=what, todo=todo)
