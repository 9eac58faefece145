"""The replicas of a sharded model as Accelerate's "processes": what counts data counts them, not ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from accelerate.utils.operations import recursively_apply
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardcore import _env
from shardcore.errors import NotSupportedError
from shardcore.mesh.axes import DATA_AXES, axis_name, host_group
from shardcore.mesh.context import ShardContext, context_of, division_of, unwrapped

_SHARED = "_shardcore_shared"  # on a parameter that is kept alike


def sharded_in(model: Any) -> nn.Module | None:
    """Return the sharded model that ``model`` is or wraps (an adapter's model, a compiled one), or None."""
    if not isinstance(model, nn.Module):
        return None
    model = unwrapped(model)
    return next((module for module in model.modules() if context_of(module) is not None), None)


def beside(model: nn.Module) -> dict[str, Tensor]:
    """Return what is trained in ``model`` beside the sharded model that it holds, by name."""
    if (sharded := sharded_in(model)) is None:
        return {}
    inside = set(map(id, sharded.parameters()))
    named = model.named_parameters()
    return {n: p for n, p in named if p.requires_grad and id(p) not in inside and not isinstance(p, DTensor)}


def whole(values: Any) -> Any:
    """Return nested ``values`` with the full tensor in the place of each DTensor."""
    return recursively_apply(lambda tensor: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor, values)


def rowwise(values: Any, rows: int, change: Callable[[Tensor], Tensor]) -> Any:
    """Return nested ``values`` with ``change`` of those tensors that have ``rows`` rows."""
    return recursively_apply(lambda t: change(t) if t.ndim and t.size(0) == rows else t, values)


@dataclass(frozen=True, eq=False)
class Replicas:
    """The replicas of one sharded model.

    Attributes:
        context: of the model.
        groups: of the ranks that hold the same part of each replica, one for each data axis, innermost first.
        ranks: the global ranks of this replica, all of which compute with the same batches.
    """

    context: ShardContext
    groups: tuple[dist.ProcessGroup, ...]
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """Return those of a sharded ``model``; every rank makes the call.

        Raises:
            NotSupportedError: it is divided among the ranks of a pipeline, or its mesh has not all ranks.
        """
        context = context_of(model)
        assert context is not None
        name = type(model).__name__
        if division_of(model) is not None:
            raise NotSupportedError(
                f"Trainer and Accelerate call a model and its backward by themselves, and this {name} is divided among "
                "the ranks of a pipeline, which runs both by its schedule. Leave pp= out of shard(), or train it with "
                "model.train_step or shardcore_shardformer.Booster"
            )
        if context.mesh.size() != dist.get_world_size():
            raise NotSupportedError(
                f"Trainer and Accelerate use all {dist.get_world_size()} ranks, and this {name} lies on "
                f"{context.mesh.size()} of them, so that it is not known which ranks are replicas. Give shard() the "
                "data axis (dp=...) or a device_mesh of all ranks"
            )
        groups = tuple(context.axis(axis).group for axis in reversed(DATA_AXES) if axis_name(context.mesh, axis))
        return cls(context, groups, context.sharers)

    @property
    def count(self) -> int:
        """The number of replicas."""
        return self.context.sizes.replicas

    @property
    def index(self) -> int:
        """Which of them this rank belongs to."""
        return self.context.replica if self.count > 1 else 0

    def tell(self) -> None:
        """Tell Accelerate's state of the process which ranks there are.

        On a CPU without ``cpu=True``, and where a launcher did not set torchrun's variables, it believes that it is
        alone; then every rank would be the main process, and write the same files.
        """
        state = PartialState()
        if state.distributed_type == DistributedType.NO or state.num_processes != dist.get_world_size():
            device = self.context.device
            kind = "GPU" if device.type == "cuda" else device.type.upper()
            state.backend = dist.get_backend()
            state.distributed_type = DistributedType[f"MULTI_{kind}"]
            state.num_processes, state.process_index = dist.get_world_size(), dist.get_rank()
            state.local_process_index = _local_rank()
            state.device = device
        if AcceleratorState._shared_state:
            # It copies these when it is made, which may have been before the ranks met.
            for name in ("backend", "distributed_type", "num_processes", "process_index", "local_process_index"):
                AcceleratorState._shared_state[name] = getattr(state, name)
            AcceleratorState._shared_state["device"] = state.device

    def share_plain(self, model: nn.Module) -> None:
        """Keep alike what is trained beside a sharded model, such as a head of the user's around it."""
        self.share(beside(model).values())

    def share(self, parameters: Iterable[Tensor]) -> None:
        """Keep alike parameters that are not sharded.

        The first rank's values are taken, and replicas average the gradients in the backward, as FSDP2 does it for the
        sharded model.
        """
        for parameter in parameters:
            if parameter.__dict__.get(_SHARED):
                continue
            dist.broadcast(parameter.detach(), src=0)
            if self.count > 1:
                parameter.register_post_accumulate_grad_hook(self._average)
            parameter.__dict__[_SHARED] = True

    def _average(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        for group in self.groups:
            dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= self.count

    def gather(self, values: Any) -> Any:
        """Return nested tensors with the rows of all replicas, in their order; a number becomes a row."""

        def one(tensor: Tensor) -> Tensor:
            tensor = whole(tensor).contiguous()
            tensor = tensor[None] if tensor.ndim == 0 else tensor
            for group in self.groups:
                rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
                dist.all_gather(rows, tensor, group=group)
                tensor = torch.cat(rows)
            return tensor

        return recursively_apply(one, values, error_on_other_type=True)

    def gather_objects(self, values: Iterable[Any]) -> list[Any]:
        """Return the items of all replicas, in their order."""
        found = list(values)
        for group in self.groups:
            parts: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(parts, found, group=group)
            found = [item for part in parts for item in part]
        return found

    def reduce(self, values: Any, reduction: str, scale: float) -> Any:
        """Return the sum or mean of nested tensors over the replicas, times ``scale``."""

        def one(tensor: Tensor) -> Tensor:
            tensor = whole(tensor).clone()
            if reduction == "none":
                return tensor
            for group in self.groups:
                dist.all_reduce(tensor, group=group)
            return (tensor / self.count if reduction == "mean" else tensor) * scale

        return recursively_apply(one, values, error_on_other_type=True)

    def padded(self, values: Any, dim: int, pad_index: int, *, first: bool) -> Any:
        """Return nested tensors of the length along ``dim`` that the longest replica has."""

        def one(tensor: Tensor) -> Tensor:
            tensor = whole(tensor)
            if dim >= tensor.ndim or dim < -tensor.ndim:
                return tensor
            longest = self.largest(tensor.size(dim), tensor.device)
            if longest == tensor.size(dim):
                return tensor
            at = dim % tensor.ndim
            result = tensor.new_full((*tensor.shape[:at], longest, *tensor.shape[at + 1 :]), pad_index)
            begin = longest - tensor.size(at) if first else 0
            result.narrow(at, begin, tensor.size(at)).copy_(tensor)
            return result

        return recursively_apply(one, values, error_on_other_type=True)

    def largest(self, number: int, device: torch.device) -> int:
        """Return the largest ``number`` of all replicas."""
        found = torch.tensor(number, device=device)
        for group in self.groups:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
        return int(found)

    def any_rank(self, number: int) -> int:
        """Return the bits that are set in ``number`` on any rank; no device waits for it."""
        flags = torch.tensor([number >> bit & 1 for bit in range(16)])
        everybody = tuple(range(dist.get_world_size()))
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=host_group(everybody))
        return sum(1 << bit for bit, flag in enumerate(flags.tolist()) if flag)

    def first(self, make: Callable[[], Any], among: Literal["all", "replica"]) -> Any:
        """Return what ``make`` returns on the first rank of all, or of this replica."""
        ranks = tuple(range(dist.get_world_size())) if among == "all" else self.ranks
        if len(ranks) == 1:
            return make()
        box = [make() if dist.get_rank() == ranks[0] else None]
        dist.broadcast_object_list(box, src=ranks[0], group=host_group(ranks))
        return box[0]

    def agree_on_generators(self) -> None:
        """Let the generators of the process, from which samplers and datasets draw, be alike within this replica."""
        own = (random.getstate(), np.random.get_state(), torch.get_rng_state())
        python, numpy, cpu = self.first(lambda: own, "replica")
        if dist.get_rank() != self.ranks[0]:
            random.setstate(python)
            np.random.set_state(numpy)
            torch.set_rng_state(cpu)


def _local_rank() -> int:
    launched = _env.torchrun()
    return dist.get_rank() if launched is None or launched.local_rank is None else launched.local_rank
