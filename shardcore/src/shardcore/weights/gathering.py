"""How the ranks of a model bring its tensors to one of them, the *writer*, or all to all, one after the other."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardcore.comm.dtensor_params import local_tensor
from shardcore.comm.parts import Block, copies_of
from shardcore.comm.raw import as_bytes
from shardcore.errors import ConfigError, NotSupportedError
from shardcore.mesh.axes import device_type_of
from shardcore.mesh.context import nearest_context


class Transport:
    """Brings tensors to the writer, part by part.

    Args:
        tensors: this rank's part of every tensor by name; what is not a DTensor is taken from the writer.
        writer: the global rank that gathers.
        reuses: what is gathered may lie where the one before it was: allocators would keep more than a file.
    """

    def __init__(self, tensors: Mapping[str, Any], writer: int, *, reuses: bool = False) -> None:
        self._tensors, self._writer, self._device = tensors, writer, torch.device(device_type_of())
        self._memory = torch.empty(0, dtype=torch.uint8) if reuses else None

    def send(self, names: Iterable[str]) -> None:
        """On the other ranks: send this rank's parts of the tensors ``names``."""
        for tensor in self._distinct(names).values():
            for owner, block in self._parts(tensor):
                if owner == dist.get_rank():
                    part = local_tensor(tensor).detach()[block.in_local]
                    dist.send(as_bytes(part.to(self._device).contiguous()), self._writer)

    def gather(self, names: Collection[str], ready: Callable[[], None]) -> dict[str, Any]:
        """On the writer: return the whole tensors ``names``, on the CPU.

        One tensor under two names arrives once. ``ready`` is called when there is room for all, before any is awaited.
        """
        distinct = self._distinct(names)
        awaited = {
            key: value
            for key, value in distinct.items()
            if isinstance(value, DTensor) and {owner for owner, _ in self._parts(value)} != {self._writer}
        }
        whole = {key: _on_cpu(value) for key, value in distinct.items() if key not in awaited}
        whole |= zip(awaited, self._rooms(list(awaited.values())), strict=True)
        ready()
        for key, tensor in awaited.items():
            self._fill(whole[key], tensor)
        return {name: whole[id(self._tensors[name])] for name in names}

    def _distinct(self, names: Iterable[str]) -> dict[int, Any]:
        return {id(self._tensors[name]): self._tensors[name] for name in names}

    def _parts(self, tensor: Any) -> Iterator[tuple[int, Block]]:
        """Yield (owner, box) for the parts that make up a DTensor, in the same order on all ranks.

        Of the copies of a part, the one that is nearest the writer is taken: on its own coordinate of every axis that
        replicates. Nothing is yielded on a mesh that the writer is not on.
        """
        if isinstance(tensor, DTensor):
            for home in (tensor.device_mesh.mesh == self._writer).nonzero().tolist():
                yield from copies_of(tensor, home)

    def _rooms(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return room for each of ``tensors``."""
        if self._memory is None:
            return [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
        # A multiple of 64 bytes for each, so that every tensor starts where its dtype may.
        ends = list(itertools.accumulate((-(-tensor.nbytes // 64) * 64 for tensor in tensors), initial=0))
        if self._memory.numel() < ends[-1]:
            self._memory = self._memory.new_empty(0)  # before there is more
            self._memory = self._memory.new_empty(ends[-1])
        memory = [self._memory[at : at + t.nbytes] for at, t in zip(ends, tensors, strict=False)]
        return [room.view(t.dtype).view(t.shape) for room, t in zip(memory, tensors, strict=True)]

    def _fill(self, whole: Tensor, tensor: DTensor) -> None:
        for owner, block in self._parts(tensor):
            part = whole[block.in_whole]
            if owner == self._writer:
                part.copy_(local_tensor(tensor).detach()[block.in_local])
                continue
            direct = part.is_contiguous() and self._device.type == "cpu"
            buffer = part if direct else torch.empty(part.shape, dtype=part.dtype, device=self._device)
            dist.recv(as_bytes(buffer), owner)
            if not direct:
                part.copy_(buffer)


def _on_cpu(value: Any) -> Any:
    """Return a tensor of which this rank holds all; anything else as it is."""
    return local_tensor(value).detach().cpu().contiguous() if isinstance(value, Tensor) else value


def full_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the full tensor of each entry of ``model.state_dict()``, on every rank.

    For the weights of a step in a process that generates with them (vLLM's ``load_weights`` takes such pairs). A tensor
    is gathered when it is asked for and may be forgotten before the next: no rank ever holds the whole model. Every
    rank of the model has to go through all of them; a tensor with several names is gathered once and yielded by its
    first.

    Args:
        model: a sharded model, one that holds it, or one that is not sharded, whose tensors are its own.

    Yields:
        The name in the unsharded model, and a plain tensor of the whole shape, on the device of the model. What is not
        split is the model's own, detached: copy what is kept beyond the next step.

    Raises:
        NotSupportedError: the model is a pipeline, of which each rank has other blocks.
        ConfigError: the model has no values yet.
    """
    context = nearest_context(model)
    if context is not None and context.sizes.pp > 1:
        raise NotSupportedError(
            f"full_tensors of a {type(model).__name__} with {context.sizes.pp} pipeline stages: each rank has other "
            "blocks. Save it (shardcore.save_checkpoint), and convert that (shardcore convert)"
        )
    state = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if isinstance(tensor, Tensor)}
    if empty := [name for name, tensor in state.items() if tensor.device.type == "meta"]:
        raise ConfigError(f"{empty[0]} is on the meta device: it has no values. Load the weights first.")
    return _gathered(state)


def _gathered(state: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    known: set[int] = set()
    for name, tensor in state.items():
        if id(tensor) not in known:
            known.add(id(tensor))
            found: Any = tensor.detach()
            yield name, found.full_tensor() if isinstance(found, DTensor) else found
