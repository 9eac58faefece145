"""Taking the weights and the training mode of one rank (``sync_from=``)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardcore.comm.dtensor_params import is_packed
from shardcore.errors import ConfigError
from shardcore.mesh.axes import device_type_of


def check_source(model: nn.Module, source: int, group: ProcessGroup | None) -> None:
    """Refuse a rank whose weights cannot be taken, or a model that could not hold them."""
    ranks = dist.get_process_group_ranks(group) if dist.is_initialized() else [0]
    if source not in ranks:
        raise ConfigError(
            f"sync_from={source} is none of the ranks that shard this model: {', '.join(map(str, ranks))}; pass one of "
            "these global ranks, or None to require equal weights"
        )
    tensors = [*model.named_parameters(), *model.named_buffers()]
    if source == (dist.get_rank() if dist.is_initialized() else 0):
        for name, tensor in tensors:
            if tensor.is_meta:
                raise ConfigError(
                    f"sync_from={source}, but {name} is on the meta device there and has no values; build the model "
                    f"with its weights on rank {source}, or leave sync_from out to shard a model without weights"
                )
        return
    known = {id(tensor) for _, tensor in tensors}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta and id(value) not in known:
                where = f"{path}.{name}" if path else name
                raise ConfigError(
                    f"sync_from={source} sends parameters and buffers, and {where} is neither: it is a plain "
                    "attribute on the meta device. Build the model of this rank outside of torch.device('meta')"
                )


def receive(model: nn.Module, source: int, group: ProcessGroup | None) -> None:
    """Give ``model`` the parameters, buffers and training modes of ``source``; meta tensors become real ones.

    All ranks of ``group`` make the call; the model of ``source``, a global rank, has the same modules.
    """
    device = torch.device(device_type_of(group))
    old: list[Tensor] = []  # kept, so that no id is used twice
    new: dict[int, Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in sorted(held.items()):  # a set may have given the order, another one on each rank
                if tensor is not None and id(tensor) not in new:
                    old.append(tensor)
                    new[id(tensor)] = _received(tensor, source, group, device)
                if tensor is not None:
                    held[name] = new[id(tensor)]  # type: ignore[assignment]  # a parameter stays one
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and id(value) in new:
                module.__dict__[name] = new[id(value)]  # a second reference to a buffer, kept as an attribute
    modes = torch.tensor([module.training for module in model.modules()], dtype=torch.uint8, device="cpu")
    for module, mode in zip(model.modules(), _received(modes, source, group, device).tolist(), strict=True):
        module.training = bool(mode)


def _received(tensor: Tensor, source: int, group: ProcessGroup | None, device: torch.device) -> Tensor:
    """Return ``tensor`` with the values of ``source``: the same object, unless it was on the meta device.

    What is sent is contiguous and on the device of the group's backend, whatever the strides and the place of
    ``tensor``; one tensor at a time is there twice.
    """
    if is_packed(tensor):
        for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]  # torch's protocol for those
            _received(getattr(tensor, name), source, group, device)
        return tensor
    sends = dist.get_rank() == source
    own = tensor.detach().to(device).contiguous() if sends else None
    sent = torch.empty(tensor.shape, dtype=tensor.dtype, device=device) if own is None else own
    dist.broadcast(sent.view(torch.uint8) if sent.itemsize == 1 else sent, source, group=group)  # gloo has no float8
    if sends:
        return tensor
    with torch.no_grad():
        if tensor.is_meta:
            real = sent.to("cpu")
            if not isinstance(tensor, nn.Parameter):
                return real
            parameter = nn.Parameter(real, requires_grad=tensor.requires_grad)
            parameter.__dict__.update(tensor.__dict__)
            return parameter
        if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
            tensor.data = sent.to(tensor.device)  # an expanded tensor has no storage for values of its own
        else:
            tensor.copy_(sent)
    return tensor
